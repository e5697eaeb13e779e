"""Reads what is appended to a bounded file of lines (`transport/files/rotated_lines.py`), across its rotations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from transport.files.appended_lines import AppendedLines, Line
from transport.files.place import BEGINNING, Place
from transport.files.rotated_lines import FORMER
from transport.files.untrusted import open_regular


@dataclass(slots=True)
class RotatedTail:
    """A place in the file, or in the former one."""

    path: Path
    place: Place = BEGINNING
    lost: int = 0
    """How often the file was rotated twice before it was read: lines of a whole file are missing each time."""

    def read(self) -> list[Line]:
        """Returns the next lines, of the former file first. Raises as `AppendedLines.new_blocks`."""
        with ExitStack() as files:
            # The present file first: if it is rotated just now, it is opened twice, and none is passed over.
            current, former = (
                _opened(files, path) for path in (self.path, self.path.with_name(self.path.name + FORMER))
            )
            for descriptor, place in self._parts(former, current):
                reader = AppendedLines(self.path, place=place)
                if lines := reader.next_lines_in(descriptor, lambda: None):
                    self.place = reader.place
                    return lines
        return []

    def _parts(self, former: int | None, current: int | None) -> Iterator[tuple[int, Place]]:
        """Yields the files in which there may be lines to read, each with the place to read from."""
        known = bool(self.place.offset)
        if known and current is not None and self.place.is_in(current):
            yield current, self.place
            return
        is_former = known and former is not None and self.place.is_in(former)
        if known and not is_former and (former is not None or current is not None):
            self.lost += 1
            self.place = BEGINNING
        if former is not None:
            yield former, self.place
        if current is not None:
            yield current, BEGINNING


def _opened(files: ExitStack, path: Path) -> int | None:
    try:
        return files.enter_context(open_regular(path)).fileno()
    except FileNotFoundError:
        return None
