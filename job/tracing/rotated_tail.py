"""Reads what is appended to a bounded file of lines (`transport/files/rotated_lines.py`), across its rotations."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from job.tracking.tail import Line, Tail
from transport.files.rotated_lines import FORMER
from transport.files.untrusted import open_regular

_FIRST_LINE_BYTES = 8192


@dataclass(slots=True)
class RotatedTail:
    """A place in the file, or in the former one."""

    path: Path
    identity: int = 0
    """Of the file that `offset` is in; 0 before the first."""
    offset: int = 0
    lost: int = 0
    """How often the file was rotated twice before it was read: lines of a whole file are missing each time."""

    def read(self) -> list[Line]:
        """Returns the next lines, of the former file first. Raises as `Tail.read`."""
        former, current = Path(f"{self.path}{FORMER}"), self.path
        now, before = _identity(current), _identity(former)
        if self.identity and self.identity not in (now, before):
            self.lost += 1
            self.identity = 0
        if before and self.identity in (0, before) and (lines := self._of(former, before)):
            return lines
        return self._of(current, now) if now else []

    def _of(self, path: Path, identity: int) -> list[Line]:
        offset = self.offset if identity == self.identity else 0
        tail = Tail(path, path.lstat().st_ino, offset)
        replaced, lines = tail.read()
        if replaced or _identity(path) != identity:  # it was rotated just now
            return []
        self.identity, self.offset = identity, tail.offset
        return lines


def _identity(path: Path) -> int:
    """Tells a file from the others that had its name: an inode's number is given again. 0 without a file with a whole line."""
    try:
        with open_regular(path) as file:
            first, newline, _ = file.read(_FIRST_LINE_BYTES).partition(b"\n")
            return os.fstat(file.fileno()).st_ino << 32 | zlib.crc32(first) if newline else 0
    except FileNotFoundError:
        return 0
