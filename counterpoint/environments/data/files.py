"""Opens data files, and digests them. A path of the operator's may be a link, and may by mistake be anything."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from counterpoint.environments.data.rows import DataError

CHUNK_BYTES = 4 * 2**20


def open_data(path: Path) -> int:
    """Returns a descriptor of the file, to be closed; never waits, as opening a FIFO would. Raises `DataError`, `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path} is not a regular file; expected a file of rows")
    return descriptor


def chunks(descriptor: int) -> Iterator[tuple[int, bytes]]:
    """Yields all of a file, piece by piece, each with its position."""
    position = 0
    while chunk := os.pread(descriptor, CHUNK_BYTES, position):
        yield position, chunk
        position += len(chunk)


def file_digest(path: Path) -> str:
    """Returns the digest of a file's bytes, in hexadecimal digits. Raises as `open_data`."""
    hashed = hashlib.blake2b(digest_size=16)
    descriptor = open_data(path)
    try:
        for _, chunk in chunks(descriptor):
            hashed.update(chunk)
    finally:
        os.close(descriptor)
    return hashed.hexdigest()
