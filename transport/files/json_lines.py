"""JSON Lines files, such as `metrics.jsonl`, that one process appends to while others read.

A line counts once its newline is there. A writer that was killed, or whose disk was full, may leave half a line; the next
append removes it first, since the line after it would be lost with it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from counterpoint.transport.exact_json import dumps
from counterpoint.transport.files.atomic import sync, write_buffers
from counterpoint.transport.files.untrusted import object_in

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 64 * 2**10


def append_line(path: Path, line: Mapping[str, Any], *, durable: bool = False) -> None:
    """Appends one JSON object, in one write if the disk allows it. One writer a file. Blocks: call it in a thread.

    `durable` waits until this line and all before it are on the disk; without it, a crash of the machine may lose lines.
    Raises `OSError` (disk full): the file then ends with the line before.
    """
    append_lines(path, [line], durable=durable)


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]], *, durable: bool = False) -> None:
    """Appends JSON objects, in one write where the disk lets it. One writer a file. Blocks: call it in a thread.

    `durable` waits until these lines and all before them are on the disk; others may be lost when the machine ends. Raises
    `OSError` (disk full): the file then ends with the line before.
    """
    append_bytes(path, b"".join(dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines), durable=durable)


def append_bytes(path: Path, data: bytes, *, durable: bool = False, mode: int = 0o666, flags: int = 0) -> None:
    """Does as `append_lines` with lines as they are, also with none. `mode` is a new file's, `flags` are added to `os.open`'s."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | flags, mode)
    try:
        size = os.fstat(descriptor).st_size
        end = _end_of_last_line(descriptor, size)
        if end < size:
            logger.warning("%s: removing %d bytes of a line that was never finished", path, size - end)
            os.ftruncate(descriptor, end)
        try:
            write_buffers(descriptor, [data])
            if durable:
                sync(descriptor)
        except OSError:
            os.ftruncate(descriptor, end)
            raise
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields every whole line, newline included, and its object.

    Skips other lines, with a warning. Yields nothing where there is no file. Raises `OSError`.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for raw in file:
            if (line := whole_object(raw)) is not None:
                yield raw, line
            else:
                logger.warning("%s: dropping a torn line of %d bytes", path, len(raw))


def lines_from_end(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Yields the lines of a file, the last one first: offset, bytes with the newline, and object.

    The object is None for a line that holds none or has no newline. Yields nothing where there is no file. Reads a block at
    a time; raises `OSError`.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        start, rest = file.seek(0, os.SEEK_END), b""
        while start:
            size = min(_BLOCK_BYTES, start)
            start -= size
            data = os.pread(file.fileno(), size, start) + rest
            *ended, last = data.split(b"\n")
            lines = [line + b"\n" for line in ended] + ([last] if last else [])
            rest = lines.pop(0) if start else b""  # it may have begun in the block before
            end = start + len(data)
            for raw in reversed(lines):
                end -= len(raw)
                yield end, raw, whole_object(raw)


def replace_end(path: Path, start: int, data: bytes) -> None:
    """Replaces the bytes of the file from `start` on, and flushes it to disk.

    An interruption loses the file's end, so the lines must be stored elsewhere, too. Raises `OSError`.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, start)
        os.lseek(descriptor, start, os.SEEK_SET)
        write_buffers(descriptor, [data])
        sync(descriptor)
    finally:
        os.close(descriptor)


def whole_object(raw: bytes) -> dict[str, Any] | None:
    """Returns the object of a line; None if it is no JSON object, or the line has no newline."""
    return object_in(raw) if raw.endswith(b"\n") else None


def _end_of_last_line(descriptor: int, size: int) -> int:
    """Returns the offset after the last newline."""
    end = size
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
