"""Intervals of time: a bounded record of when something was busy, and how long that was altogether.

A role that is busy thousands of times in a step still writes few spans of it (`spans.py`): `BusyIntervals` joins neighbours, the
smallest gaps first, and keeps what was really busy. `busy_seconds` adds up intervals that overlap, such as those of two runs at
one server. Times are in seconds, on any one clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low

MAX_INTERVALS = 64
"""Most intervals that `BusyIntervals` holds, unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of time from `begin` to `end`; `busy` is fewer seconds than that where intervals were joined."""

    begin: float
    end: float
    busy: float

    @property
    def density(self) -> float:
        """The share of it that was busy, from 0 to 1."""
        length = self.end - self.begin
        return min(1.0, max(0.0, self.busy / length)) if length > 0 else 0.0


class BusyIntervals:
    """Intervals that do not overlap, added in their order; at most `most` of them after each `add`."""

    def __init__(self, most: int = MAX_INTERVALS) -> None:
        self._most = most
        self._intervals: list[Interval] = []

    def add(self, begin: float, end: float) -> None:
        """Adds one, which begins no sooner than the last one ended. An interval without length is dropped."""
        if end <= begin:
            return
        self._intervals.append(Interval(begin, end, end - begin))
        if len(self._intervals) > self._most:
            self._join()

    def take(self) -> list[Interval]:
        """Returns the intervals, and forgets them."""
        taken, self._intervals = self._intervals, []
        return taken

    def _join(self) -> None:
        """Joins neighbours across the smaller half of the gaps."""
        limit = median_low(after.begin - before.end for before, after in pairwise(self._intervals))
        joined = self._intervals[:1]
        for interval in self._intervals[1:]:
            last = joined[-1]
            if interval.begin - last.end <= limit:
                joined[-1] = Interval(last.begin, interval.end, last.busy + interval.busy)
            else:
                joined.append(interval)
        self._intervals = joined


def busy_seconds(intervals: Iterable[Interval], begin: float, end: float) -> float:
    """Returns for how many seconds between `begin` and `end` at least one interval was busy.

    Of joined intervals it is known how much was busy, not when: where such overlap, their shares are added, up to all of it.
    """
    edges: list[tuple[float, float]] = []
    for interval in intervals:
        first, last = max(interval.begin, begin), min(interval.end, end)
        if first < last and interval.density > 0:
            edges += [(first, interval.density), (last, -interval.density)]
    edges.sort()
    total, since, open_intervals, density = 0.0, begin, 0, 0.0
    for at, change in edges:
        total += (at - since) * min(1.0, density)
        since = at
        open_intervals += 1 if change > 0 else -1
        density = density + change if open_intervals else 0.0  # no rounding is carried over a gap
    return total
