"""An append-only file of entries, each with checksums, so that an end that was cut off is told from damage.

An entry is a head (bytes of the body, CRC-32 of the body, CRC-32 of both) and the body. A process that is killed while it
appends leaves the beginning of an entry, and a machine that crashes may leave zeros. Both are at the end, and nobody was told
that they were stored. Whatever else is not as it was written is damage, and is refused. The journals of channels
(`counterpoint/cluster/channel/journal.py`) and of experiments (`counterpoint/tune/runner/journal.py`) are such files.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from counterpoint.transport.files.atomic import Buffer, as_bytes_view, write_buffers

_SIZES = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
HEAD_BYTES = _SIZES.size + _CHECKSUM.size


class DamagedEntry(ValueError):
    """An entry is not as it was written; `offset` is where it begins, in bytes."""

    def __init__(self, offset: int, place: Path | None = None) -> None:
        begins = "" if offset else " (or an earlier version of Counterpoint wrote it)"
        super().__init__(
            f"{place or 'the file'} is damaged at byte {offset}: the checksum of the entry there does not hold{begins}. Restore "
            f"it from a copy, or go on with what was before by cutting the file off there (truncate -s {offset})"
        )
        self.offset = offset


class EntryFile:
    """A file to which entries are appended, by one process at a time."""

    def __init__(self, path: Path, end: int | None = None) -> None:
        """Opens it, or creates it. It is cut off at `end`: what follows there belongs to no entry. Raises `OSError`."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if end is not None:
            os.ftruncate(self._descriptor, end)
        self.length = os.fstat(self._descriptor).st_size
        """The length of the entries that are in it, in bytes."""

    def append(self, entries: Sequence[Buffer], sync: bool = False) -> None:
        """Adds entries, heads and bodies; with `sync` it waits for the disk.

        Raises `OSError`, as for a full disk: the file is then as before.
        """
        try:
            write_buffers(self._descriptor, entries)
            if sync:
                os.fdatasync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, self.length)
            raise
        self.length = os.fstat(self._descriptor).st_size

    def flush(self) -> None:
        """Waits until all that was appended is on the disk. Raises `OSError`, also after `close`."""
        if (descriptor := self._descriptor) < 0:
            raise OSError(errno.EBADF, "the file of entries is closed")
        os.fdatasync(descriptor)

    def close(self) -> None:
        """Closes the file; what was appended is the operating system's."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def head_of(body: Sequence[Buffer]) -> bytes:
    """Returns the head of an entry whose body is these parts."""
    size, checksum = 0, 0
    for part in map(as_bytes_view, body):
        size, checksum = size + part.nbytes, zlib.crc32(part, checksum)
    sizes = _SIZES.pack(size, checksum)
    return sizes + _CHECKSUM.pack(zlib.crc32(sizes))


def read_entry_file(path: Path) -> Iterator[tuple[memoryview, int]]:
    """Yields as `read_entries` what is in a file. Raises `DamagedEntry`, which names it and says what to do; `OSError`."""
    try:
        yield from read_entries(path.read_bytes())
    except DamagedEntry as error:
        raise DamagedEntry(error.offset, path) from None


def read_entries(content: Buffer) -> Iterator[tuple[memoryview, int]]:
    """Yields the body of each whole entry, a view, and the offset of its end. Raises `DamagedEntry`."""
    view, offset = as_bytes_view(content), 0
    while offset + HEAD_BYTES <= view.nbytes:
        sizes, begin = view[offset : offset + _SIZES.size], offset + HEAD_BYTES
        size, checksum = _SIZES.unpack(sizes)
        if _CHECKSUM.unpack_from(view, offset + _SIZES.size)[0] != zlib.crc32(sizes):
            if bytes(view[offset:]).strip(b"\0"):
                raise DamagedEntry(offset)
            return
        if begin + size > view.nbytes:
            return
        if zlib.crc32(view[begin : begin + size]) != checksum:
            raise DamagedEntry(offset)
        offset = begin + size
        yield view[begin:offset], offset
