"""The newest steps of one run, read from the end of its `metrics.jsonl`: what the overview needs, however long the file is."""

from __future__ import annotations

import os
from pathlib import Path

from job.inspection.metrics_lines import Line, step_of
from job.inspection.status import RATE_STEPS
from transport.files.untrusted import UntrustedFileError, open_regular, parse_json

KEPT_STEPS = RATE_STEPS + 2
"""Steps that are read: those of the token rate, and the one before them."""

MOST_LINES = 4 * KEPT_STEPS
"""Lines that are looked at, since some may be no steps."""

FIRST_BYTES, MOST_BYTES = 2**15, 2**21


class NewestSteps:
    """Reads one file whenever it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self.lines: dict[int, Line] = {}
        """By step."""
        self.empty: tuple[str, ...] = ()
        """The metrics of the newest step that are `null`: they were not finite."""

    def refresh(self) -> None:
        """Reads the file's end if it has changed. Raises `OSError`, and `UntrustedFileError` for anything but a regular file."""
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            self._seen, self.lines, self.empty = None, {}, ()
            return
        with file:
            found = os.fstat(file.fileno())
            seen = (found.st_ino, found.st_size, found.st_mtime_ns)
            if seen == self._seen:
                return
            raw_lines = _end_of(file.fileno(), found.st_size)
        self.lines, self.empty, self._seen = {}, (), seen
        for raw in reversed(raw_lines):
            if len(self.lines) == KEPT_STEPS:
                break
            line = step_of(raw)
            if line and line["step"] not in self.lines:  # of two lines of a step the later one counts
                self.empty = self.empty if self.lines else nulls_of(raw)
                self.lines[line["step"]] = line


def nulls_of(raw: bytes) -> tuple[str, ...]:
    """Returns the metrics of a line that are `null`, as numbers are written that are not finite."""
    try:
        return tuple(name for name, value in parse_json(raw).items() if value is None)
    except UntrustedFileError:
        return ()


def _end_of(descriptor: int, size: int) -> list[bytes]:
    """The last whole lines, `MOST_LINES` at most; fewer if lines are very long."""
    count = FIRST_BYTES
    while True:
        begin = max(0, size - count)
        data = os.pread(descriptor, size - begin, begin)
        lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]
        if begin:
            lines = lines[1:]  # the first may have begun before
        if len(lines) > KEPT_STEPS or begin == 0 or count >= MOST_BYTES:
            return lines[-MOST_LINES:]
        count *= 4
