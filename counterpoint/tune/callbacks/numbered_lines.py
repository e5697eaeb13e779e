"""A file with a line for each result of a trial, in which line n is result n, whatever was killed and resumed meanwhile.

Results are numbered by the runner. A number that the file has already means that a resumed runner goes on from there: what the
file has from that line on is removed, since it will be told again. A torn last line is removed, too.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

from counterpoint.transport.files.json_lines import append_bytes

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 2**20


class NumberedLines:
    """One such file, of one writer. It is open only during a call, so that thousands of trials need no descriptors."""

    def __init__(self, path: Path, header_lines: int = 0) -> None:
        self.path = path
        self._header_lines = header_lines
        self._count = self._repair()

    @property
    def count(self) -> int:
        """The number of the last result in it."""
        return self._count

    def append(self, line: bytes, number: int | None = None) -> None:
        """Writes a result's line, newline included; without a number it is the next. Blocks. Raises `OSError`."""
        number = self._count + 1 if number is None else number
        if number <= self._count:
            self._cut(number - 1)
        elif number > self._count + 1:
            logger.warning("%s: results %d to %d are missing", self.path, self._count + 1, number - 1)
        self.write(line)
        self._count = number

    def write(self, data: bytes) -> None:
        """Appends bytes as they are, such as the header. A failed write leaves nothing."""
        append_bytes(self.path, data)

    def _repair(self) -> int:
        """Removes a torn last line; returns how many results there are."""
        if not self.path.exists():
            return 0
        append_bytes(self.path, b"")
        with self.path.open("rb") as file:
            lines = sum(block.count(b"\n") for block in iter(partial(file.read, _BLOCK_BYTES), b""))
        return max(0, lines - self._header_lines)

    def _cut(self, keep: int) -> None:
        """Removes all after so many results."""
        with self.path.open("rb") as file:
            for _ in range(keep + self._header_lines):
                file.readline()
            end = file.tell()
        os.truncate(self.path, end)
        self._count = keep
