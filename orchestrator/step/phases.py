"""Where a step's time goes: a clock that is in exactly one phase at a time, so that a step's phases add up to its wall time.

A step lasts from the end of the one before it, or from the daemon's start of work, to its own. While its boundary is taken, the
phases are the boundary's (`step.py`), whatever else goes on meanwhile; at any other time what its batch waits for, as the
scheduler says (`Scheduler.awaited`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

Awaited = Literal["generation", "finalize", "wait_trainer", "wait_inference"]
"""What a batch waits for: rollouts in flight; judgements; newer weights, without which nothing may start or ship; servers, or the
loading of weights."""

_PREFIX = "phase/"
_WORDS = {
    "finalize": "finalizing",
    "wait_trainer": "waiting for the trainer",
    "wait_inference": "waiting for inference",
}
_WORTH_SAYING = 0.005


class PhaseClock:
    """`clock` is in seconds. Nothing is counted before the first phase."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._phase: str | None = None
        self._since = self._began = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, phase: str) -> None:
        """The present phase ends and `phase` begins."""
        now = self._clock()
        if self._phase is None:
            self._began = now
        else:
            self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def so_far(self) -> dict[str, float]:
        """The step's metrics until now: `phase/<name>` in seconds, and `wall_seconds`, which they add up to."""
        if self._phase is None:
            return {}
        self.enter(self._phase)
        seconds = {f"{_PREFIX}{phase}": seconds for phase, seconds in self._seconds.items()}
        return seconds | {"wall_seconds": self._since - self._began}

    def take(self) -> dict[str, float]:
        """As `so_far`. The next step begins."""
        taken = self.so_far()
        self._seconds.clear()
        self._began = self._since
        return taken


def sum_phases(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by phase over metrics lines, the most first."""
    total: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        for name, value in line.items():
            if name.startswith(_PREFIX) and isinstance(value, int | float):
                total[name.removeprefix(_PREFIX)] += value
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def phases_in_words(seconds: Mapping[str, float]) -> str:
    """As shares, in one short line: `generation 71 %, waiting for the trainer 20 %`. Empty where there is nothing."""
    whole = sum(seconds.values())
    if whole <= 0:
        return ""
    shares = ((name, value / whole) for name, value in seconds.items())
    return ", ".join(
        f"{_WORDS.get(name, name)} {100 * share:.0f} %" for name, share in shares if share >= _WORTH_SAYING
    )
