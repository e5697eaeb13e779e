"""The lines of a growing JSON Lines file, each given once, however the file grows, is cut or is replaced between two looks.

Anybody may have written the file, and its writer goes on while we read. A line counts once its newline is there. A resume
removes the lines beyond a step and writes others, in place (`orchestrator/metrics.py`) or in a new file
(`counterpoint/trainer/metrics.py`): then everything is given again. `place.py` has the rule by which a file is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from counterpoint.transport.files.place import BEGINNING, Place
from counterpoint.transport.files.untrusted import open_regular

BLOCK_BYTES = 2**18
"""Bytes read at once."""

LONGEST_LINE = 2**22
"""A longer line is skipped. Ours have some kilobytes."""

LINES_BYTES, MOST_LINES = 2**22, 2**15
"""Bytes and lines after which `next_lines` returns, at the end of a block: each line takes some 400 bytes of memory."""

MOST_BYTES = 2**28
"""Bytes read in one look; the next look reads the rest. A file of another's may have any size."""


@dataclass(frozen=True, slots=True)
class Line:
    """A whole line."""

    place: Place
    """The place where it begins."""
    text: bytes
    """The text, without its newline."""


class AppendedLines:
    """Reads one file.

    `newest_bytes`: of a file met anew, reads no more than these bytes of its end. `place`: where an earlier reader of the file
    was; if it is in another file, this one is met anew.
    """

    def __init__(self, path: Path, newest_bytes: int | None = None, place: Place | None = None) -> None:
        self.path = path
        self._newest_bytes = newest_bytes
        self.more = False
        """Whether the last look ended at `MOST_BYTES`, or where its caller stopped: another gives what follows."""
        self._place = place if place is not None and place.offset else None
        """The place where the next look begins; None before the first."""
        self._skips = False
        self.left_out = 0
        """Bytes at the beginning of the file that are not read, since it was longer than `newest_bytes`."""

    @property
    def place(self) -> Place:
        """Where in the file the next look begins."""
        return self._place or BEGINNING

    def restart(self) -> None:
        """Meets the file anew at the next look."""
        self._place, self._skips = None, False

    @property
    def how_far(self) -> str:
        """Says how much of a file has been read that is too long for one look, for people."""
        return f"{self.path}: only its first {self.place.offset / 1e9:.1f} GB have been read"

    def new_blocks(self, restart: Callable[[], None]) -> Iterator[tuple[int, bytes]]:
        """Yields whole lines, many at once, with the offset of the first.

        Calls `restart` first if what was given before no longer counts. Yields nothing where there is no file. Raises `OSError`,
        and `UntrustedFileError` for anything but a regular file.
        """
        for place, block in self._placed_blocks(restart):
            yield place.offset, block

    def next_lines(self, restart: Callable[[], None]) -> list[Line]:
        """Returns the next lines, some `LINES_BYTES` of them. Calls `restart` and raises as `new_blocks`."""
        return lines_of(self._placed_blocks(restart))

    def _placed_blocks(self, restart: Callable[[], None]) -> Iterator[tuple[Place, bytes]]:
        self.more = False
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return
        with file:
            yield from self.blocks_in(file.fileno(), restart)

    def blocks_in(self, descriptor: int, restart: Callable[[], None]) -> Iterator[tuple[Place, bytes]]:
        """Yields the new whole lines of an open file, many at once, with the place of the first. As `new_blocks`."""
        if self._place is None or not self._place.is_in(descriptor):
            restart()
            size = os.fstat(descriptor).st_size
            self._place = Place.at(
                descriptor, max(0, size - self._newest_bytes) if self._newest_bytes is not None else 0
            )
            self.left_out = self._place.offset
            self._skips = self._place.offset > 0  # it is within a line
        yield from self._blocks(descriptor, self._place)

    def _blocks(self, descriptor: int, place: Place) -> Iterator[tuple[Place, bytes]]:
        self.more = False
        size, until = BLOCK_BYTES, place.offset + MOST_BYTES
        while place.offset < until and (data := os.pread(descriptor, size, place.offset)):
            end = data.rfind(b"\n") + 1
            if end:
                begin = data.find(b"\n") + 1 if self._skips else 0
                first, size, self._skips = place.plus(data[:begin]), BLOCK_BYTES, False
                self._place = place = first.plus(data[begin:end])
                if begin < end:
                    self.more = True  # if the caller stops here
                    yield first, data[begin:end]
                    self.more = False
            elif self._skips or len(data) > LONGEST_LINE:
                self._skips, size = True, BLOCK_BYTES
                self._place = place = place.plus(data)
            elif len(data) < size:
                return
            else:
                size = LONGEST_LINE + 1
        self.more = place.offset >= until


def lines_of(blocks: Iterator[tuple[Place, bytes]]) -> list[Line]:
    """Returns the lines of the next blocks, some `LINES_BYTES` of them."""
    lines: list[Line] = []
    read = 0
    for place, block in blocks:
        for text in block[:-1].split(b"\n"):
            lines.append(Line(place, text))
            place = place.plus(text + b"\n")
        read += len(block)
        if read >= LINES_BYTES or len(lines) >= MOST_LINES:
            break
    return lines
