"""The lines of a growing JSON Lines file, each given once, however the file grows, is cut or is replaced between two looks.

Anybody may have written the file, and its writer goes on while we read. A line counts once its newline is there. A resume
removes the lines beyond a step and writes others, in place (`orchestrator/metrics.py`) or in a new file (`trainer/metrics.py`):
then everything is given again. The file's inode, its size, and the bytes before our place tell.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from transport.files.untrusted import open_regular

BLOCK_BYTES = 2**20
"""Bytes read at once."""

LONGEST_LINE = 2**22
"""A longer line is skipped. Ours have some kilobytes."""

MOST_BYTES = 2**28
"""Bytes read in one look; the next look reads the rest. A file of another's may have any size."""

COMPARED_BYTES = 256
"""Bytes before our place that are compared: they hold the newest line's times, which no other line has."""


class AppendedLines:
    """Reads one file. `newest_bytes`: of a file met anew, reads no more than these bytes of its end."""

    def __init__(self, path: Path, newest_bytes: int | None = None) -> None:
        self.path = path
        self._newest_bytes = newest_bytes
        self.more = False
        """Whether the last look ended at `MOST_BYTES`, or where its caller stopped: another gives what follows."""
        self._inode: int | None = None
        self.offset = 0
        """Where in the file the next look begins."""
        self._before = b""
        self._skips = False

    @property
    def how_far(self) -> str:
        """Says how much of a file has been read that is too long for one look, for people."""
        return f"{self.path}: only its first {self.offset / 1e9:.1f} GB have been read"

    def new_blocks(self, restart: Callable[[], None]) -> Iterator[tuple[int, bytes]]:
        """Yields whole lines, many at once, with the offset of the first.

        Calls `restart` first if what was given before no longer counts. Yields nothing where there is no file. Raises `OSError`,
        and `UntrustedFileError` for anything but a regular file.
        """
        self.more = False
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return
        with file:
            if not self._continues(file.fileno()):
                restart()
                self._begin(file.fileno())
            yield from self._blocks(file.fileno())

    def _continues(self, descriptor: int) -> bool:
        """Whether the file still begins with what was read."""
        found = os.fstat(descriptor)
        if found.st_ino != self._inode or found.st_size < self.offset:
            return False
        return os.pread(descriptor, len(self._before), self.offset - len(self._before)) == self._before

    def _begin(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self._inode, self._before = found.st_ino, b""
        self.offset = max(0, found.st_size - self._newest_bytes) if self._newest_bytes is not None else 0
        self._skips = self.offset > 0  # it is within a line

    def _blocks(self, descriptor: int) -> Iterator[tuple[int, bytes]]:
        size, until = BLOCK_BYTES, self.offset + MOST_BYTES
        while self.offset < until and (data := os.pread(descriptor, size, self.offset)):
            end = data.rfind(b"\n") + 1
            if end:
                begin = data.find(b"\n") + 1 if self._skips else 0
                offset, size, self._skips = self.offset + begin, BLOCK_BYTES, False
                self._pass(data[:end])
                if begin < end:
                    self.more = True  # if the caller stops here
                    yield offset, data[begin:end]
                    self.more = False
            elif self._skips or len(data) > LONGEST_LINE:
                self._skips, size = True, BLOCK_BYTES
                self._pass(data)
            elif len(data) < size:
                return
            else:
                size = LONGEST_LINE + 1
        self.more = self.offset >= until

    def _pass(self, data: bytes) -> None:
        self.offset += len(data)
        self._before = (self._before + data[-COMPARED_BYTES:])[-COMPARED_BYTES:]
