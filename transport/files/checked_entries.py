"""Entries of an append-only file, each with checksums, so that an end that was cut off is told from damage.

An entry is a head (bytes of the body, CRC-32 of the body, CRC-32 of both) and the body. A process that is killed while it
appends leaves the beginning of an entry, and a machine that crashes may leave zeros. Both are at the end, and nobody was told
that they were stored. Whatever else is not as it was written is damage. The journals of channels (`cluster/channel/journal.py`)
and of experiments (`tune/runner/journal.py`) are made of entries.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

from transport.files.atomic import Buffer, as_bytes_view

_SIZES = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
HEAD_BYTES = _SIZES.size + _CHECKSUM.size


class DamagedEntry(ValueError):
    """An entry is not as it was written; `offset` is where it begins, in bytes."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"the checksum of the entry at byte {offset} does not hold")
        self.offset = offset


def head_of(body: Sequence[Buffer]) -> bytes:
    """Returns the head of an entry whose body is these parts."""
    size, checksum = 0, 0
    for part in map(as_bytes_view, body):
        size, checksum = size + part.nbytes, zlib.crc32(part, checksum)
    sizes = _SIZES.pack(size, checksum)
    return sizes + _CHECKSUM.pack(zlib.crc32(sizes))


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
