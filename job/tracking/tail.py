"""Reads what is appended to a JSON Lines file, some megabytes a call, from an offset that outlives the process.

The file may be hostile: only a regular file is read, and too long lines are skipped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from transport.files.untrusted import open_regular

MOST_BYTES = 4 * 2**20
"""Read in one call; a longer line is skipped."""


@dataclass(frozen=True, slots=True)
class Line:
    """A whole line."""

    start: int
    """Its offset."""
    text: bytes


@dataclass(slots=True)
class Tail:
    """A place in a file."""

    path: Path
    inode: int = 0
    """Of the file that `offset` is in; 0 before the first."""
    offset: int = 0

    def read(self) -> tuple[bool, list[Line]]:
        """Returns whether the file was replaced since, and its next lines: of a replaced file, those from its beginning.

        Raises `OSError`, and `UntrustedFileError` for anything but a regular file.
        """
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return False, []
        with file:
            stat = os.fstat(file.fileno())
            replaced = stat.st_ino != self.inode or stat.st_size < self.offset
            if replaced:
                self.inode, self.offset = stat.st_ino, 0
            file.seek(self.offset)
            data = file.read(MOST_BYTES)
        whole, newline, _ = data.rpartition(b"\n")
        if not newline:
            self.offset += len(data) if len(data) == MOST_BYTES else 0
            return replaced, []
        lines, start = [], self.offset
        for text in whole.split(b"\n"):
            lines.append(Line(start, text))
            start += len(text) + 1
        self.offset = start
        return replaced, lines

    def restart(self) -> None:
        """Reads the file from its beginning again."""
        self.inode = self.offset = 0
