"""A quantile of numbers that arrive one by one, in O(log n) a number."""

from __future__ import annotations

import math
from heapq import heappush, heapreplace
from typing import Any

from counterpoint.tune.schedulers.metric_scheduler import number_from_json, number_to_json


class RunningQuantile:
    """The quantile as `numpy.percentile` defines it by default: linear between the two nearest numbers.

    The numbers up to the quantile's place are in one heap with the largest on top, the others in one with the smallest on top.
    """

    def __init__(self, fraction: float) -> None:
        # As numpy computes it from a percentage: decisions at a tie depend on the last bit.
        self._fraction = (fraction * 100) / 100
        self._lower: list[float] = []
        self._upper: list[float] = []

    def __len__(self) -> int:
        return len(self._lower) + len(self._upper)

    def add(self, number: float) -> None:
        """Takes a number that is not NaN."""
        belongs_below = bool(self._lower) and number < -self._lower[0]
        grows = math.floor(len(self) * self._fraction) + 1 > len(self._lower)
        if grows and not belongs_below and self._upper and self._upper[0] < number:
            heappush(self._lower, -heapreplace(self._upper, number))
        elif grows:
            heappush(self._lower, -number)
        elif belongs_below:
            heappush(self._upper, -heapreplace(self._lower, -number))
        else:
            heappush(self._upper, number)

    def value(self) -> float | None:
        """The quantile; None of no numbers."""
        if not self._lower:
            return None
        place = (len(self) - 1) * self._fraction
        share = place - math.floor(place)
        below = -self._lower[0]
        if not share or not self._upper or below == self._upper[0] or math.isinf(below):
            return below
        above = self._upper[0]
        step = above - below
        return above - step * (1 - share) if share >= 0.5 else below + step * share

    def state(self) -> list[Any]:
        """Both heaps, as JSON values."""
        return [[number_to_json(number) for number in heap] for heap in (self._lower, self._upper)]

    def restore_state(self, state: list[Any]) -> None:
        """Takes back what `state` returned."""
        self._lower, self._upper = ([number_from_json(number) for number in heap] for heap in state)
