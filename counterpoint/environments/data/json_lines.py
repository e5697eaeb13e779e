"""Rows of a file with one JSON object a line, or of one JSON array of objects. Only their positions are in memory.

The file stays open, so that one that is replaced meanwhile changes nothing; one that is overwritten is noticed where a line no
longer is one.
"""

from __future__ import annotations

import codecs
import hashlib
import mmap
import os
import weakref
from pathlib import Path

import msgspec
import numpy as np

from counterpoint.environments.data.files import chunks, open_data
from counterpoint.environments.data.rows import DataError, Row, Rows
from counterpoint.transport.exact_json import JsonError, read_row
from counterpoint.transport.records import Int64Array

_CHECKED_ROWS = 1000
"""Rows that are parsed when the file is opened; the others when they are asked for."""
_PEEKED_BYTES = 4096
_NEWLINE = 10
_BLANK_BYTES = 3
"""A line of at most this many bytes may be blank and is looked at when the file is opened."""


class JsonLines(Rows):
    """The rows of one file."""

    def __init__(self, path: Path, max_row_bytes: int) -> None:
        """Reads the file once. Raises `DataError`, `OSError`."""
        self._path = path
        self._descriptor = open_data(path)
        weakref.finalize(self, os.close, self._descriptor)
        lines, self._fingerprint = _scan(self._descriptor)
        self._is_array = _begins_an_array(self._descriptor, int(lines[0]))
        self._starts, self._stops = self._elements(int(lines[0])) if self._is_array else (lines[:-1], lines[1:])
        self._lines: Int64Array | None = None
        lengths = self._stops - self._starts
        if len(lengths) and (largest := int(lengths.argmax())) >= 0 and lengths[largest] > max_row_bytes:
            raise DataError(
                f"{self.where(largest)}: it has {lengths[largest]} bytes; expected at most max_row_bytes = {max_row_bytes}"
            )
        if not self._is_array:
            self._lines = self._written_lines(lengths)
        for index in range(min(len(self), _CHECKED_ROWS)):
            self.row(index)

    def __len__(self) -> int:
        return len(self._starts) if self._lines is None else len(self._lines)

    @property
    def fingerprint(self) -> str:
        """See `Rows`: of the file's bytes."""
        return self._fingerprint

    def row(self, index: int) -> Row:
        """See `Rows`."""
        line = self._line(index)
        try:
            value = read_row(self._bytes(line))
        except JsonError as error:
            raise DataError(f"{self.where(index)}: {error}") from None
        if not isinstance(value, dict):
            raise DataError(f"{self.where(index)}: it is a {type(value).__name__}; expected an object")
        return value

    def where(self, index: int) -> str:
        """See `Rows`."""
        return f"{self._path}, row {index}" if self._is_array else f"{self._path}:{self._line(index) + 1}"

    def _line(self, index: int) -> int:
        return index if self._lines is None else int(self._lines[index])

    def _bytes(self, line: int) -> bytes:
        start, stop = int(self._starts[line]), int(self._stops[line])
        return os.pread(self._descriptor, stop - start, start)

    def _elements(self, first: int) -> tuple[Int64Array, Int64Array]:
        """Returns where the elements of the array that begins at `first` start and stop. Raises `DataError`."""
        whole = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        text = np.frombuffer(whole, np.uint8)[first:]
        try:
            parts = msgspec.json.decode(text.data, type=list[msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{self._path} begins as a JSON array, and is none: {error}") from None
        views = [np.frombuffer(part, np.uint8) for part in parts]
        starts = np.array([view.ctypes.data for view in views], np.int64) - text.ctypes.data + first
        lengths = np.array([len(view) for view in views], np.int64)
        return starts, starts + lengths

    def _written_lines(self, lengths: Int64Array) -> Int64Array | None:
        """Returns the lines that are not blank, counted from 0; None if none is."""
        short = np.flatnonzero(lengths <= _BLANK_BYTES).tolist()
        blank = [line for line in short if not self._bytes(line).strip()]
        return np.delete(np.arange(len(lengths)), blank) if blank else None


def _begins_an_array(descriptor: int, position: int) -> bool:
    while blank := os.pread(descriptor, _PEEKED_BYTES, position):
        if said := blank.lstrip():
            return said.startswith(b"[")
        position += len(blank)
    return False


def _scan(descriptor: int) -> tuple[Int64Array, str]:
    """Returns the lines' positions, with the end of the last, and the digest of all bytes."""
    hashed = hashlib.blake2b(digest_size=16)
    found = [np.zeros(1, np.int64)]
    end = 0
    for position, chunk in chunks(descriptor):
        if position == 0 and chunk.startswith(codecs.BOM_UTF8):  # as some editors begin a file
            found[0][0] = len(codecs.BOM_UTF8)
        hashed.update(chunk)
        found.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE) + (position + 1))
        end = position + len(chunk)
    starts = np.concatenate(found)
    if starts[-1] != end:  # the last line has no end of line
        starts = np.append(starts, end)
    return starts, hashed.hexdigest()
