"""A journal: one file of entries, each with checksums, that is appended to and replayed, and replaced whole once it has grown.

An entry is a head (bytes of the body, CRC-32 of the body, CRC-32 of both) and the body. The first entry says how many bytes
appeared at once, when the file was made or compacted. Behind these, a process that is killed while it appends leaves the
beginning of an entry, and a machine that crashes may leave zeros: nobody was told that they were stored, and they are cut off.
Whatever else is not as it was written is damage, and is refused. What an entry means, and that one process has the journal at a
time (`lock.py`), are its user's.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from counterpoint.transport.files.atomic import Buffer, as_bytes_view, sync, write_atomically, write_buffers

Body = Sequence[Buffer]
"""The body of an entry, in parts. They are taken by reference and written one after the other."""

_SIZES = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
HEAD_BYTES = _SIZES.size + _CHECKSUM.size
_FIRST = struct.Struct("<Q")


class DamagedJournal(ValueError):
    """A file is no journal, or is not as it was written; the message names it and the place, and says what to do."""


class FileJournal:
    """A journal, to be replayed before anything else, by one process at a time. All of it blocks on the disk."""

    def __init__(self, path: Path, smallest: int, first: Iterable[Body] = ()) -> None:
        """Opens it, or makes it, with these entries; below `smallest` bytes it is not worth compacting. Raises `OSError`."""
        self.path = path
        self.length = 0
        """Its bytes."""
        self._smallest = smallest
        self._compacted = 0
        """How many of them appeared at once."""
        self._descriptor = -1
        if path.exists():
            self._open()
        else:
            self.compact(first)

    def replay(self) -> list[memoryview]:
        """Returns the bodies of its entries, views of what was read, and cuts off what follows them.

        Raises `DamagedJournal` before anything is changed, and `OSError`.
        """
        bodies, end, is_damaged = read_entries(self.path.read_bytes())
        first = bodies.pop(0) if bodies else b""
        self._compacted = _FIRST.unpack(first)[0] if len(first) == _FIRST.size else 0
        if not self._compacted:
            raise DamagedJournal(
                f"{self.path} is damaged at byte 0, or no journal of this version of Counterpoint: restore it from a copy, or "
                "move it away to begin anew"
            )
        if end < self._compacted:
            raise DamagedJournal(
                f"{self.path} is damaged at byte {end}: restore it from a copy, or move it away to begin anew"
            )
        if is_damaged:
            raise DamagedJournal(
                f"{self.path} is damaged at byte {end}: the checksum of the entry there does not hold. Restore it from a copy, "
                f"or go on with what was before by cutting the file off there (truncate -s {end})"
            )
        os.ftruncate(self._descriptor, end)
        self.length = end
        return bodies

    def append(self, bodies: Iterable[Body], *, durable: bool = False) -> None:
        """Adds entries, in one write where the disk lets it; they outlive the process, and, with `durable`, the machine's crash.

        Raises `OSError`, as for a full disk: the journal is then as before.
        """
        try:
            write_buffers(self._descriptor, _entries_of(bodies))
            if durable:
                sync(self._descriptor)
        except OSError:
            try:
                os.ftruncate(self._descriptor, self.length)
            except OSError:
                self.close()  # nothing may follow half an entry
            raise
        self.length = os.fstat(self._descriptor).st_size

    @property
    def has_grown(self) -> bool:
        """Whether it has doubled since it was compacted: if it is compacted then, all that is ever written stays linear."""
        return self.length - self._compacted > max(self._smallest, self._compacted)

    def compact(self, bodies: Iterable[Body], *, durable: bool = True) -> None:
        """Replaces all entries by these, at once for readers. Raises `OSError`, as for a full disk: it is then as before."""
        entries = _entries_of(bodies)
        size = HEAD_BYTES + _FIRST.size + sum(as_bytes_view(part).nbytes for part in entries)
        write_atomically(self.path, *_entries_of([[_FIRST.pack(size)]]), *entries, durable=durable)
        self.close()  # before the new one is opened: nothing is ever appended to the former
        self._open()
        self.length = self._compacted = size

    def flush(self) -> None:
        """Waits until all that was appended is on the disk. Raises `OSError`."""
        sync(self._descriptor)

    def close(self) -> None:
        """Closes the file; what was appended is the operating system's. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


def read_entries(content: Buffer) -> tuple[list[memoryview], int, bool]:
    """Returns the bodies of the whole entries at the beginning, the offset of their end, and whether damage follows there."""
    view, offset, bodies = as_bytes_view(content), 0, list[memoryview]()
    while (begin := offset + HEAD_BYTES) <= view.nbytes:
        sizes = view[offset : offset + _SIZES.size]
        size, checksum = _SIZES.unpack(sizes)
        if _CHECKSUM.unpack_from(view, offset + _SIZES.size)[0] != zlib.crc32(sizes):
            return bodies, offset, bool(bytes(view[offset:]).strip(b"\0"))
        if begin + size > view.nbytes:
            break
        if zlib.crc32(view[begin : begin + size]) != checksum:
            return bodies, offset, True
        offset = begin + size
        bodies.append(view[begin:offset])
    return bodies, offset, False


def _entries_of(bodies: Iterable[Body]) -> list[Buffer]:
    return [part for body in bodies for part in (_head_of(body), *body)]


def _head_of(body: Body) -> bytes:
    size, checksum = 0, 0
    for part in map(as_bytes_view, body):
        size, checksum = size + part.nbytes, zlib.crc32(part, checksum)
    sizes = _SIZES.pack(size, checksum)
    return sizes + _CHECKSUM.pack(zlib.crc32(sizes))
