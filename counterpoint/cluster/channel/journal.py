"""What a channel's host keeps on its disk, so that its death loses no record: the notes of its state, in a journal.

A note is the length of its header, the header in msgpack, and a record's frames. With `sync` it outlives the machine's crash.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path

import msgpack

from counterpoint.cluster.channel.queue import Note, QueueState
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.files.journal import DamagedJournal, FileJournal
from counterpoint.transport.files.lock import take_lock

SMALLEST_BYTES = 64 * 2**20
"""A shorter journal is not compacted."""

_LENGTH = struct.Struct("<I")


class StateJournal:
    """One channel's journal, of one host at a time."""

    def __init__(self, directory: Path, sync: bool = False) -> None:
        """Reads the `state` that an earlier host left.

        Raises `OSError` when another host has the directory, or it cannot be written; `DamagedJournal`.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._sync = sync
        self._journal: FileJournal | None = None
        self._lock = take_lock(directory / "lock", f"{directory} is another host's; one host keeps a channel at a time")
        self.state = QueueState()
        try:
            if (old := next(directory.glob("*.journal"), None)) is not None:
                raise DamagedJournal(
                    f"{old} is an earlier version's: end the job with that version, or remove {directory}"
                )
            self._journal = FileJournal(directory / "records", SMALLEST_BYTES)
            for body in self._journal.replay():
                self.state.apply(*_note_of(body))
            if not self.state.generation:
                self.state.generation = secrets.token_hex(8)
                self.append([*self.state.notes()])
        except BaseException:
            self.close()
            raise

    def append(self, notes: Sequence[Note]) -> None:
        """Writes notes, which the state has already. Raises `OSError`, as for a full disk; then nothing of them is there."""
        assert self._journal is not None
        if self._journal.has_grown:
            self._journal.compact(map(_body_of, self.state.notes()), durable=self._sync)
        elif notes:
            self._journal.append(map(_body_of, notes), durable=self._sync)

    def close(self) -> None:
        """Frees the files. Safe to call twice."""
        if self._journal is not None:
            self._journal.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _body_of(note: Note) -> list[Buffer]:
    change, frames = note
    views = [as_bytes_view(frame) for frame in frames]
    header: bytes = msgpack.packb([change, [view.nbytes for view in views]])
    return [_LENGTH.pack(len(header)), header, *views]


def _note_of(body: memoryview) -> Note:
    at = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    change, sizes = msgpack.unpackb(body[_LENGTH.size : at], strict_map_key=False)
    frames = []
    for size in sizes:
        frames.append(bytes(body[at : at + size]))
        at += size
    return change, frames
