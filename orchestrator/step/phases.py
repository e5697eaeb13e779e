"""Times the phases of steps: the clock is in exactly one phase at a time, so a step's phases add up to its wall time.

A step lasts from the end of the previous one, or from the daemon's start of work, to its end. During its boundary the phases
are the boundary's (`boundary.py`). At any other time the phase is the one that its batch waits for
(`RolloutScheduler.awaited`), such as generation.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from counterpoint.transport.telemetry.intervals import BusyIntervals, Interval

_PREFIX = "phase/"
_WORDS = {
    "finalize": "advantages and filters",
    "merge": "making samples",
    "records": "writing rollouts",
    "commit": "saving the state",
    "malloc_trim": "returning memory",
    "wait_stragglers": "waiting for stragglers",
    "wait_trainer": "waiting for the trainer",
    "wait_inference": "waiting for inference",
}
_WORTH_SAYING = 0.005


class PhaseClock:
    """Sums seconds by phase, and keeps each phase's times.

    `clock` is in seconds. Time before the first phase does not count.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._phase: str | None = None
        self._since = self._began = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._entered = 0.0
        """The time when the present phase began, or the step, whichever is later."""
        self._intervals: defaultdict[str, BusyIntervals] = defaultdict(BusyIntervals)
        self.last_step: dict[str, list[Interval]] = {}
        """The time of each phase of the step taken last, in `clock`'s seconds."""

    def enter(self, phase: str) -> None:
        """Ends the present phase and begins `phase`."""
        now = self._clock()
        if self._phase is None:
            self._began = self._entered = now
        else:
            self._seconds[self._phase] += now - self._since
            if phase != self._phase:
                self._intervals[self._phase].add(self._entered, now)
                self._entered = now
        self._phase, self._since = phase, now

    def so_far(self) -> dict[str, float]:
        """Returns the step's metrics so far: `phase/<name>` in seconds, and `wall_seconds`, their sum."""
        if self._phase is None:
            return {}
        self.enter(self._phase)
        seconds = {f"{_PREFIX}{phase}": seconds for phase, seconds in self._seconds.items()}
        return seconds | {"wall_seconds": self._since - self._began}

    def take(self) -> dict[str, float]:
        """Returns `so_far` and begins the next step."""
        taken = self.so_far()
        if self._phase is not None:
            self._intervals[self._phase].add(self._entered, self._since)
        self.last_step = {phase: intervals.take() for phase, intervals in self._intervals.items()}
        self._seconds.clear()
        self._began = self._entered = self._since
        return taken


def sum_phases(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Sums the phases of metrics lines, in seconds, the longest first."""
    total: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        for name, value in line.items():
            if name.startswith(_PREFIX) and isinstance(value, int | float):
                total[name.removeprefix(_PREFIX)] += value
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def phases_in_words(seconds: Mapping[str, float]) -> str:
    """Returns shares in one short line: `generation 71 %, waiting for the trainer 20 %`. Empty for no phases."""
    whole = sum(seconds.values())
    if whole <= 0:
        return ""
    shares = ((name, value / whole) for name, value in seconds.items())
    return ", ".join(
        f"{_WORDS.get(name, name)} {100 * share:.0f} %" for name, share in shares if share >= _WORTH_SAYING
    )
