"""What a channel's host keeps on its disk, so that its death loses no record: an append-only journal in segments.

An entry (`transport/files/checked_entries.py`) is the length of a header, the header in msgpack, and a record's frames. Each
segment begins with the whole state but the records (`LendingState`), so that a segment is needed only for the records in it that
are not acknowledged, and is removed when there are none. `flush` passes the entries to the operating system, which keeps them
when the process is killed; with `sync` it waits for the disk, and they outlive the machine's crash. A cut-off entry at the end,
left by a host that was killed while it wrote, is ignored: nobody was told that it was stored. Damage is refused.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack

from counterpoint.cluster.channel.lending import LendingState
from counterpoint.cluster.channel.positions import PositionSet
from counterpoint.transport.files.atomic import Buffer, as_bytes_view, write_atomically
from counterpoint.transport.files.checked_entries import DamagedEntry, EntryFile, head_of, read_entry_file
from counterpoint.transport.files.lock import take_lock

SEGMENT_BYTES = 64 * 2**20
"""A segment is followed by another once it is as long."""

_LENGTH = struct.Struct("<I")
"""Bytes of the header."""

STATE, PUT, ACKNOWLEDGE, SKIP, END, OWN = range(6)

Record = tuple[str, int, Sequence[Buffer]]
"""Origin, position and frames."""


class JournalError(RuntimeError):
    """A journal that this host cannot read; the message names the file."""


class Journal:
    """One channel's journal, of one host at a time. Only `flush` and the constructor touch the disk."""

    def __init__(self, directory: Path, sync: bool = False) -> None:
        """Reads what an earlier host left: `state` and `records`.

        Raises `OSError` when another host has the directory, or it cannot be written; `JournalError` for a damaged journal.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._sync = sync
        self._lock = take_lock(directory / "lock", f"{directory} is another host's; one host keeps a channel at a time")
        self.state = LendingState()
        self.records: dict[int, Record] = {}
        self.generation = ""
        """Names this journal: sequence numbers of another generation mean other records."""
        self._segment_of: dict[int, int] = {}
        self._live: dict[int, int] = {}
        """Records in each segment that are not acknowledged."""
        self._pending: list[Buffer] = []
        self._pending_live: list[int] = []
        self._file: EntryFile | None = None
        try:
            self._current = self._read_all()
            self._begin_segment()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the files; entries that were not flushed are lost."""
        if self._file is not None:
            self._file.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- writing ---

    def put(self, sequence: int, origin: str, position: int, frames: Sequence[Buffer]) -> None:
        """Notes a record. Its frames are taken by reference until `flush`."""
        views = [as_bytes_view(frame) for frame in frames]
        self._note([PUT, sequence, origin, position, [view.nbytes for view in views]], views)
        self._pending_live.append(sequence)

    def acknowledge(self, sequences: Sequence[int]) -> None:
        """Notes that records are acknowledged."""
        self._note([ACKNOWLEDGE, list(sequences)])
        for sequence in sequences:
            segment = self._segment_of.pop(sequence, None)
            if segment is not None:
                self._live[segment] -= 1

    def skip(self, origin: str, position: int) -> None:
        """Notes that a position was skipped."""
        self._note([SKIP, origin, position])

    def end(self, name: str) -> None:
        """Notes that a producer has ended."""
        self._note([END, name])

    def own(self, name: str, sequence: int) -> None:
        """Notes that a record belongs to a sticky consumer."""
        self._note([OWN, name, sequence])

    def flush(self) -> None:
        """Writes what was noted.

        Raises `OSError`, as for a full disk; then nothing of it is in the journal, and a later call tries again.
        """
        if not self._pending:
            return
        assert self._file is not None
        self._file.append(self._pending, self._sync)
        self._pending = []
        for sequence in self._pending_live:
            if sequence in self.state.kept:
                self._segment_of[sequence] = self._current
                self._live[self._current] += 1
        self._pending_live = []
        if self._file.length >= SEGMENT_BYTES:
            self._begin_segment()

    def _note(self, header: list[object], frames: Sequence[memoryview] = ()) -> None:
        self._pending += _entry(header, frames)

    def _begin_segment(self) -> None:
        """Begins a segment with the state as it is, and removes those that hold nothing any more."""
        state = self.state
        positions = {origin: [each.watermark, each.above] for origin, each in state.positions.items()}
        kept = [[sequence, state.owners.get(sequence)] for sequence in state.kept]
        header = [STATE, self.generation, state.next_sequence, positions, sorted(state.ended), kept]
        path = self._path(self._current + 1)
        write_atomically(path, *_entry(header), durable=self._sync)
        file, former = EntryFile(path), self._file
        if former is not None:
            former.close()
        self._file, self._current = file, self._current + 1
        self._live[self._current] = 0
        for segment in [segment for segment, live in self._live.items() if live == 0 and segment != self._current]:
            self._path(segment).unlink(missing_ok=True)
            del self._live[segment]

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:012d}.journal"

    # --- reading ---

    def _read_all(self) -> int:
        """Folds the segments into `state` and `records`; returns the number of the last one."""
        segments = sorted(int(path.stem) for path in self._directory.glob("*.journal") if path.stem.isdecimal())
        if not segments:
            self.generation = secrets.token_hex(8)
            return 0
        entries = _entries(self._path(segments[-1]))
        self._take_state(next(entries, None), self._path(segments[-1]))
        self._live = dict.fromkeys(segments, 0)
        for segment in segments[:-1]:
            for header, frames in _entries(self._path(segment)):
                if header[0] == PUT and header[1] in self.state.kept:
                    self._take_record(segment, header, frames)
        for header, frames in entries:
            self._fold(segments[-1], header, frames)
        if missing := self.state.kept.keys() - self.records.keys():
            raise JournalError(
                f"{self._directory} lacks {len(missing)} records that it should hold, such as number {min(missing)}; a "
                "segment was removed or damaged. Restore it, or remove the directory to begin anew without them"
            )
        return segments[-1]

    def _take_state(self, entry: tuple[list[Any], Sequence[Buffer]] | None, path: Path) -> None:
        match entry[0] if entry is not None else None:
            case [0, str(generation), int(following), dict(positions), list(ended), list(kept)]:
                self.generation = generation
                self.state = LendingState(
                    following,
                    {origin: PositionSet(watermark, above) for origin, (watermark, above) in positions.items()},
                    set(ended),
                    {sequence: None for sequence, _ in kept},
                    {sequence: owner for sequence, owner in kept if owner is not None},
                )
            case other:
                raise JournalError(f"{path} does not begin with a state of this version but with {other!r:.80}")

    def _take_record(self, segment: int, header: list[Any], frames: Sequence[Buffer]) -> None:
        _, sequence, origin, position, _ = header
        self.records[sequence] = (origin, position, [bytes(as_bytes_view(frame)) for frame in frames])
        self._segment_of[sequence] = segment
        self._live[segment] += 1

    def _fold(self, segment: int, header: list[Any], frames: Sequence[Buffer]) -> None:
        state = self.state
        match header:
            case [1, sequence, origin, position, _]:
                state.next_sequence = sequence + 1
                state.positions.setdefault(origin, PositionSet()).add(position)
                state.kept[sequence] = None
                self._take_record(segment, header, frames)
            case [2, sequences]:
                for sequence in sequences:
                    state.kept.pop(sequence, None)
                    state.owners.pop(sequence, None)
                    self.records.pop(sequence, None)
                    if (holder := self._segment_of.pop(sequence, None)) is not None:
                        self._live[holder] -= 1
            case [3, origin, position]:
                state.positions.setdefault(origin, PositionSet()).add(position)
            case [4, name]:
                state.ended.add(name)
            case [5, name, sequence]:
                state.owners[sequence] = name


def _entry(header: list[object], frames: Sequence[memoryview] = ()) -> list[Buffer]:
    packed: bytes = msgpack.packb(header)
    body: list[Buffer] = [_LENGTH.pack(len(packed)), packed, *frames]
    return [head_of(body), *body]


def _entries(path: Path) -> Iterator[tuple[list[Any], Sequence[Buffer]]]:
    """Yields headers and frames of a segment, without an entry at the end that was cut off. Raises `JournalError`."""
    try:
        for body, _ in read_entry_file(path):
            at = _LENGTH.size + _LENGTH.unpack_from(body)[0]
            header = msgpack.unpackb(body[_LENGTH.size : at], strict_map_key=False)
            frames = []
            for size in header[4] if header[0] == PUT else ():
                frames.append(body[at : at + size])
                at += size
            yield header, frames
    except DamagedEntry as error:
        raise JournalError(str(error)) from None
