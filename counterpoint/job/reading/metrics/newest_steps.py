"""The newest steps of runs, read from the ends of the files `metrics.jsonl`, however long these are, and the reward's trend."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from counterpoint.job.reading.metrics.history import RATE_STEPS
from counterpoint.job.reading.metrics.metrics_lines import SHORTEST_BYTES, Line, is_number, step_of
from counterpoint.job.reading.metrics.sampled_lines import Trend
from counterpoint.job.reading.metrics.trained_lines import METRICS_FILE
from counterpoint.transport.files.appended_lines import AppendedLines
from counterpoint.transport.files.untrusted import object_in

KEPT_STEPS = RATE_STEPS + 2
"""Steps that are read: those of the token rate, and the one before them."""

MOST_LINES = 4 * KEPT_STEPS
"""Lines of one look that are parsed, from its end, since some may be no steps."""

FIRST_BYTES, MOST_BYTES = 2**15, 2**21
"""Bytes read from the end of a new file: at first, and at most if lines are long."""


class NewestSteps:
    """Follows one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self, newest_bytes: int = FIRST_BYTES) -> None:
        self._newest_bytes = newest_bytes
        self._reader = AppendedLines(self._path, newest_bytes)
        self._clear()

    def _clear(self) -> None:
        self.lines: dict[int, Line] = {}
        """The lines by step. A new mapping after each look that found something, since others keep it."""
        self.empty: tuple[str, ...] = ()
        """The metrics of the newest step that are `null`: they were not finite."""
        self.reward = Trend("reward/mean")
        """The mean reward over the whole run."""

    def refresh(self) -> None:
        """Reads what was appended. Raises `OSError`, and `UntrustedFileError` for anything but a regular file."""
        if not self._path.exists():
            self._begin()
            return
        while not self._look() and self._newest_bytes < MOST_BYTES:
            self._begin(4 * self._newest_bytes)
        self.reward.refresh(self._path, self._reader.place.offset)

    def _look(self) -> bool:
        """Reads on; returns whether enough of the file's end was read."""
        raw_lines: list[bytes] = []
        for _, block in self._reader.new_blocks(self._clear):
            raw_lines = [*raw_lines, *block.split(b"\n")[:-1]][-MOST_LINES:]
        if raw_lines:
            self._add(raw_lines)
        return len(self.lines) >= KEPT_STEPS or self._reader.place.offset <= self._newest_bytes

    def _add(self, raw_lines: list[bytes]) -> None:
        lines = dict(self.lines)
        for raw in raw_lines:
            if line := step_of(raw):
                lines.pop(line["step"], None)  # of two lines of a step the later one counts, in its place
                lines[line["step"]] = line
                self.empty = nulls_of(raw)
        self.lines = dict([*lines.items()][-KEPT_STEPS:])


def nulls_of(raw: bytes) -> tuple[str, ...]:
    """Returns the metrics of a line that are `null`, as numbers are written that are not finite."""
    return tuple(name for name, value in (object_in(raw) or {}).items() if value is None)


KEPT_TRAINED = 8
"""Newest trained steps of a run that the overview knows of."""

LEAST_END_BYTES, END_BYTES_A_RUN, MOST_END_BYTES = 2**18, 3 * 2**12, 2**25
"""How much of the file's end is read for the overview: room for `KEPT_TRAINED` lines of each run, side by side."""


@dataclass(slots=True)
class NewestTrained:
    """The newest trained steps of one run."""

    mismatch: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT_TRAINED))
    """Step and mismatch KL."""
    phases: deque[Line] = field(default_factory=lambda: deque(maxlen=KEPT_TRAINED))
    """The phases of the newest lines."""
    times: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TRAINED))
    """When these steps were trained, in Unix seconds."""
    raw: bytes = b""
    """The bytes of the newest line."""

    @property
    def line(self) -> Line:
        """The newest line; empty if there is none."""
        return step_of(self.raw) if self.raw else {}


class TrainedEnd:
    """The newest steps of every run that was trained lately, by run id."""

    def __init__(self, directory: Path, runs: int) -> None:
        """`runs`: how many there are, about."""
        newest_bytes = min(MOST_END_BYTES, LEAST_END_BYTES + runs * END_BYTES_A_RUN)
        self._lines = AppendedLines(directory / METRICS_FILE, newest_bytes)
        self.runs: dict[str, NewestTrained] = {}

    def refresh(self) -> None:
        """Reads what was appended. Raises as `AppendedLines`."""
        for _, block in self._lines.new_blocks(self.runs.clear):
            for raw in block.splitlines():
                self._add(raw)

    def _add(self, raw: bytes) -> None:
        if len(raw) < SHORTEST_BYTES or (values := object_in(raw)) is None:
            return
        run_id, step, mismatch = values.get("run_id"), values.get("step"), values.get("mismatch_kl")
        if not isinstance(run_id, str) or type(step) is not int or not is_number(values.get("time")):
            return
        newest = self.runs.setdefault(run_id, NewestTrained())
        newest.raw = raw
        newest.phases.append(
            {name: value for name, value in values.items() if name.startswith("phase/") and is_number(value)}
        )
        newest.times.append(values["time"])
        if isinstance(mismatch, int | float) and is_number(mismatch):
            newest.mismatch.append((step, mismatch))
