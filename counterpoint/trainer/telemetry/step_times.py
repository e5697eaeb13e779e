"""When a step's forward and backward passes and its updates were, on this rank: bounded, however many rows it has.

The times are the host's. On a GPU a pass may still be under way when the host goes on, so what one pass takes may show in the
next; the update waits for all of them, and the step's time is right.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from counterpoint.transport.telemetry.intervals import BusyIntervals, Interval


class StepTimes:
    """The times of one open step, in seconds of `time.perf_counter`."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self._busy: defaultdict[str, BusyIntervals] = defaultdict(BusyIntervals)

    def add(self, name: str, begin: float, end: float) -> None:
        """Adds one interval; those of a name in their order."""
        self._busy[name].add(begin, end)

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Adds the time of the block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, begin, time.perf_counter())

    def take(self) -> dict[str, list[Interval]]:
        """Returns the intervals by name, and forgets them."""
        taken, self._busy = self._busy, defaultdict(BusyIntervals)
        return {name: intervals.take() for name, intervals in taken.items()}
