"""Reads growing metrics files and checks every line, since a guest may write anything into its run's files.

A line that is not a step's is skipped, and so is a value of the wrong type; the orchestrator logs this when it repairs the file.
`counterpoint/job/reading/metrics/history.py` keeps the lines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from counterpoint.orchestrator.early_warnings import watch as early_warnings
from counterpoint.orchestrator.step.discarded import DISCARDED_FILE
from counterpoint.run.loop_health.slow_spots import METRIC, SlowSpot
from counterpoint.transport.files.appended_lines import AppendedLines
from counterpoint.transport.files.untrusted import UntrustedFileError, object_in, read_json

Line = dict[str, Any]
"""One step's metrics, by the names in `metrics.jsonl` (`docs/contracts.md`)."""

MAX_REPORT_BYTES = 2**16
"""Most bytes of a run's report on discarded rollouts."""

SHORTEST_BYTES = len(b'{"step":1,"time":1}')
"""A shorter line holds no step and is not parsed: a file of newlines would take minutes."""

LARGEST = 1e18
"""Larger numbers are skipped: their sums and differences could be infinite."""


class Follower:
    """Reads the lines of steps appended to a metrics file since the last call."""

    def __init__(self, path: Path, newest_bytes: int | None = None) -> None:
        """Reads no more than `newest_bytes` of the end of a file that is met anew."""
        self.path = path
        self._lines = AppendedLines(path, newest_bytes)

    @property
    def left_out(self) -> int:
        """Returns how many bytes at the beginning of the file are not read."""
        return self._lines.left_out

    @property
    def unread(self) -> str:
        """Says that the last call did not come to the end of the file, and how far it came; empty if it did."""
        return self._lines.how_far if self._lines.more else ""

    def new_lines(self, restart: Callable[[], None], deadline: float = math.inf) -> Iterator[Line]:
        """Yields the new lines: of a replaced file, all lines, after a call of `restart`.

        A resume that removes steps replaces the file. Past `deadline`, by the monotonic clock, it ends with the block that it is
        in, and the next call reads on. Raises `OSError`, and `UntrustedFileError` for anything but a regular file.
        """
        for _, block in self._lines.new_blocks(restart):
            for text in block.splitlines():
                if line := step_of(text):
                    yield line
            if time.monotonic() >= deadline:
                return


def step_of(text: bytes) -> Line:
    """Parses the line of a step and drops values that no metric can have; returns an empty line for any other text."""
    if len(text) < SHORTEST_BYTES or (values := object_in(text)) is None:
        return {}
    # The condition is that of `is_number`, without a call for each value: the page reads thousands of lines.
    line: Line = {
        name: value
        for name, value in values.items()
        if (type(value) is float or type(value) is int) and -LARGEST < value < LARGEST
    }
    if type(line.get("step")) is not int or line["step"] < 0 or "time" not in line:
        return {}
    if isinstance(values.get("run_id"), str):
        line["run_id"] = values["run_id"]
    if early_warnings.METRIC in values:
        line[early_warnings.METRIC] = [asdict(each) for each in early_warnings.read_warnings(values)]
    line[METRIC] = [fields for fields in _items(values.get(METRIC)) if _is_slow_spot(fields)]
    return line


def read_discarded(run_dir: Path) -> Line:
    """Reads a run's report on its discarded rollouts (`orchestrator.step.discarded.Report`); empty without a usable one.

    Raises `OSError`.
    """
    try:
        values = read_json(run_dir / DISCARDED_FILE, MAX_REPORT_BYTES)
    except (FileNotFoundError, UntrustedFileError):
        return {}
    report: Line = {name: value for name, value in values.items() if is_number(value)}
    if not {"step", "discarded"} <= report.keys() or not isinstance(values.get("reason"), str):
        return {}
    failure = values.get("failure")
    said = {"reason": values["reason"], "failure": failure if isinstance(failure, str) else ""}
    return report | said | {"notable": values.get("notable") is True}


def is_number(value: object) -> bool:
    """Returns whether a metric can have this value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_slow_spot(fields: object) -> bool:
    if not isinstance(fields, dict):
        return False
    try:
        slow_spot = SlowSpot.of_json(fields)
    except (KeyError, TypeError, ValueError):
        return False
    numbers = (slow_spot.seconds, slow_spot.worst, slow_spot.count, slow_spot.place.line)
    words = (
        slow_spot.callback,
        slow_spot.thread,
        slow_spot.place.function,
        slow_spot.place.file,
        slow_spot.place.inside,
    )
    return all(map(is_number, numbers)) and all(isinstance(word, str) for word in words)
