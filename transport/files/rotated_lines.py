"""A JSON Lines file of bounded size, for what is worth reading and not worth waiting for: decisions, spans. Writer and reader.

When the file is full it becomes `<name>.1`, in place of the former one. Neither a disk that is full nor one that is slow costs
anything but lines: `append` never raises. `files/json_lines.py` has the format. Anybody may have written what is read, and the
writer goes on meanwhile.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from counterpoint.transport.files.appended_lines import AppendedLines, Line, lines_of
from counterpoint.transport.files.json_lines import append_lines
from counterpoint.transport.files.place import BEGINNING, Place
from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular

logger = logging.getLogger(__name__)

FORMER = ".1"
"""Added to the file's name when it is full."""


class RotatedLines:
    """The writer of one such file: one writer a file, one thread at a time."""

    def __init__(self, path: Path, what: str, max_bytes: int) -> None:
        """`what` names the lines in the log, in the plural; the two files have at most about `max_bytes` each."""
        self._path = path
        self._what = what
        self._max_bytes = max_bytes
        self._is_failing = False

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Writes the lines. Blocks: call it in a thread. A failure is logged once, and costs the lines."""
        try:
            append_lines(self._path, lines)
            if self._path.stat().st_size > self._max_bytes:
                os.replace(self._path, f"{self._path}{FORMER}")
            self._is_failing = False
        except Exception as error:  # noqa: BLE001 - a value that is no JSON, too: nobody who adds lines expects a failure
            if not self._is_failing:
                logger.warning("%s cannot be written; %s are missing from it: %s", self._path, self._what, error)
            self._is_failing = True


class RotatedReader:
    """Reads one such file and its former part, each whole line once, the former part first. For one thread at a time.

    `newest_bytes` and `place` are as of `AppendedLines`. The file need not exist yet.
    """

    def __init__(self, path: Path, newest_bytes: int | None = None, place: Place = BEGINNING) -> None:
        self._paths = (path, path.with_name(path.name + FORMER))
        self._newest_bytes = newest_bytes
        self._reader = AppendedLines(path, newest_bytes, place)
        self.file = 0
        """The number of the file that the newest block is of. At most the one before it still exists."""
        self.lost = 0
        """How often the file was rotated twice before it was read: each time lines may be missing."""

    @property
    def place(self) -> Place:
        """The place behind all that was given: in the file, or in its former part."""
        return self._reader.place

    def new_blocks(self) -> Iterator[tuple[Place, bytes]]:
        """Yields whole lines, many at once, with the place of the first. Raises as `AppendedLines.new_blocks`."""
        with ExitStack() as files:
            # The present file first: if it is rotated just now, it is opened twice, and none is passed over.
            path, former_path = self._paths
            current, former = _opened(files, path), _opened_former(files, former_path)
            for reader, descriptor in self._parts(former, current):
                for block in reader.blocks_in(descriptor, lambda: None):
                    if reader is not self._reader:
                        self._reader, self.file = reader, self.file + 1
                    yield block
                if reader.more:
                    return

    def next_lines(self) -> list[Line]:
        """Returns the next lines, as many as `AppendedLines.next_lines`. Raises as `new_blocks`."""
        return lines_of(self.new_blocks())

    def read_before(self, end: Place, size: int) -> bytes:
        """Returns the `size` bytes before a place, which were given before; none if they are gone."""
        for path in self._paths:
            try:
                with open_regular(path) as file:
                    if end.is_in(file.fileno()):
                        return os.pread(file.fileno(), size, end.offset - size)
            except (OSError, UntrustedFileError):
                continue
        return b""

    def _parts(self, former: int | None, current: int | None) -> Iterator[tuple[AppendedLines, int]]:
        """Yields the open files in which there may be lines to read, each with its reader."""
        known = bool(self.place.offset)
        if known and current is not None and self.place.is_in(current):
            yield self._reader, current
            return
        if known and former is not None and self.place.is_in(former):
            yield self._reader, former
        elif former is not None or current is not None:
            self.lost += known
            self._reader = self._anew()
            if former is not None:
                yield self._anew(), former
        if current is not None:
            yield self._anew(), current

    def _anew(self) -> AppendedLines:
        return AppendedLines(self._paths[0], self._newest_bytes)


def _opened_former(files: ExitStack, path: Path) -> int | None:
    """Opens the former part. One that cannot be read hides nothing of the present one."""
    try:
        return _opened(files, path)
    except (OSError, UntrustedFileError) as error:
        logger.debug("%s is passed over: %s", path, error)
        return None


def _opened(files: ExitStack, path: Path) -> int | None:
    try:
        return files.enter_context(open_regular(path)).fileno()
    except FileNotFoundError:
        return None
