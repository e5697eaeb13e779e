"""Writes the routing of a step's groups to the disk as they are finalized, so that the boundary has little left to write.

With experts, routing is nearly all of a batch, and groups are finalized long before the boundary of their step. The file has no
name until it is the step's record: a killed process leaves nothing of it. It only saves time: if it cannot be written, or holds
routing that the batch lacks, the boundary writes the whole record.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock

import numpy as np

from counterpoint.transport import codec
from counterpoint.transport.files.atomic import Buffer, as_bytes_view, naming
from counterpoint.transport.files.direct import append
from counterpoint.transport.process.yield_gil import yielding_gil
from counterpoint.transport.records import Batch, Rollout, RoutingArray

logger = logging.getLogger(__name__)


def with_routing(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Returns those rollouts of a finalized group that are to be trained on and have routing."""
    return [
        rollout
        for rollout in rollouts
        if rollout.error is None
        and rollout.filtered_by is None
        and any(branch.routed_experts for branch in rollout.branches or ())
    ]


class RoutingAhead:
    """The record of one step, begun before its batch is known. `add` and `publish` block: call them in threads."""

    def __init__(self, directory: Path, most_rollouts: int) -> None:
        """Makes the file in `directory`, with the first routing. Once it holds `most_rollouts`, adds no more."""
        self._directory = directory
        self._room = most_rollouts
        self._turn = Lock()
        self._file = -1
        self._close_file: weakref.finalize[[int], RoutingAhead] | None = None
        self._end = 0
        self._places: dict[int, codec.Place] = {}
        """The place of each chunk in the file, by its `id`."""
        self._chunks: list[RoutingArray] = []
        """The chunks themselves, so that no other object gets the `id` of one."""

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Writes and flushes the routing of those rollouts of a finalized group that are to be trained on. Raises nothing."""
        kept = with_routing(rollouts)
        with self._turn:
            if not kept or self._room <= 0:
                return
            self._room -= len(kept)
            try:
                with naming(self._directory):
                    self._write(kept)
            except OSError as error:
                _warn(str(error))
                self._close()

    def publish(self, path: Path, batch: Batch) -> bool:
        """Makes the record of `batch` appear as `path`, which the caller flushes. The object is of no use after that.

        Returns False, with nothing at `path`, if the caller has to write it: the file holds routing that the batch lacks, or
        less than half of the batch's, or the disk has refused it.
        """
        with self._turn:
            try:
                return self._file >= 0 and self._complete(path, batch)
            except OSError as error:
                logger.warning("the record is written once more: %s", error)
                return False
            finally:
                self._close()

    def _write(self, rollouts: Sequence[Rollout]) -> None:
        if self._file < 0:
            self._directory.mkdir(exist_ok=True)  # not its parents: a deleted run stays deleted
            self._file = os.open(self._directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
            self._close_file = weakref.finalize(self, os.close, self._file)
            append(self._file, [codec.INDEXED_MAGIC])
            self._end = len(codec.INDEXED_MAGIC)
        chunks = [
            chunk
            for rollout in yielding_gil(rollouts)
            for branch in rollout.branches or ()
            if any(turn.trained_tokens for turn in branch.turns)
            for chunk in branch.routed_experts
        ]
        places = self._append([np.ascontiguousarray(chunk) for chunk in chunks])
        self._places.update(zip(map(id, chunks), places, strict=True))
        self._chunks += chunks
        os.fdatasync(self._file)

    def _complete(self, path: Path, batch: Batch) -> bool:
        chunks = [chunk for sample in batch.routed_experts for chunk in sample]
        needed = {id(chunk) for chunk in chunks}
        written = sum(length for _, length in self._places.values())
        if (
            len(needed) < len(chunks)
            or not self._places.keys() <= needed
            or 2 * written < sum(c.nbytes for c in chunks)
        ):
            return False
        frames = codec.encode(batch)
        known = [None] * (len(frames) - len(chunks)) + [self._places.get(id(chunk)) for chunk in chunks]
        rest = iter(self._append([frame for frame, place in zip(frames, known, strict=True) if place is None]))
        self._append([codec.index_of([place or next(rest) for place in known])])
        # `src_dir_fd` makes Python follow the link in /proc to the file.
        os.link(f"/proc/self/fd/{self._file}", path, src_dir_fd=self._file, follow_symlinks=True)
        return True

    def _append(self, buffers: Sequence[Buffer]) -> list[codec.Place]:
        """Writes each buffer, padded, and returns their places."""
        places: list[codec.Place] = []
        padded: list[Buffer] = []
        for view in map(as_bytes_view, buffers):
            places.append((self._end, view.nbytes))
            padding = bytes(-view.nbytes % codec.FILE_ALIGNMENT)
            padded += [view, padding]
            self._end += view.nbytes + len(padding)
        append(self._file, padded)
        return places

    def _close(self) -> None:
        self._room = 0
        if self._close_file is not None:
            self._close_file()
        self._file, self._places, self._chunks = -1, {}, []


@cache
def _warn(error: str) -> None:
    """Logs it once: a file system without unnamed files, such as NFS, refuses each step's."""
    logger.warning("routing is not written ahead, but with the record of its step: %s", error)
