"""How many requests a server is sent at once: raised while it keeps up, cut when it does not. Pure: observations in, a cap out.

Additive rise, multiplicative cut. Every run's orchestrator has a controller of its own for each server, and they know nothing
of one another; but they see the same server, and where all rise by the same amount and fall by the same share, they approach
equal caps (D.-M. Chiu and R. Jain, "Analysis of the Increase and Decrease Algorithms for Congestion Avoidance in Computer
Networks", 1989). `load_report` reads the observations, a server's `monitor` passes them on.
"""

from __future__ import annotations

from dataclasses import dataclass

FAST_INCREASE, SLOW_INCREASE = 8, 1
"""Requests added at a look at a server that is at its ease, and at one that is merely not overloaded. The same for every run,
whatever its ceiling, and never nothing: shares become equal by being cut again and again."""

DECREASE_FACTOR = 0.75
"""What a cut leaves."""

LOWEST_CAP = 4
"""No cut goes below it: a run that gets next to nothing learns nothing about the server either."""

OBSERVATIONS_IN_A_ROW = 2
"""Looks that must agree before the cap moves: a step begins with a burst, which is gone at the next."""

OVERLOADED_CACHE_USE, SPARE_CACHE_USE = 0.95, 0.85
"""KV-cache use from which the server counts as overloaded, and up to which it is at its ease."""

OVERLOADED_QUEUE, SPARE_QUEUE = 1.5, 0.5
"""Requests that wait for each that runs, likewise. One batch in waiting keeps an engine busy; more only makes rollouts stale."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a server says of its load, all runs together."""

    cache_use: float
    """Share of the KV cache that running requests hold, 0 to 1."""
    running: int
    """Requests being computed."""
    waiting: int
    """Requests that wait for room, not those that wait for a slot of their adapter."""
    preemptions: int
    """Requests thrown out of the KV cache to be computed again, since the server's start."""


class CapacityController:
    """The cap of one run at one server: `floor <= cap <= ceiling`. It begins halfway, so that a newcomer floods nobody."""

    def __init__(self, ceiling: int) -> None:
        self.ceiling = ceiling
        self.floor = min(LOWEST_CAP, ceiling)
        self.cap = max(self.floor, ceiling // 2)
        self._preemptions: int | None = None
        self._overloaded = 0
        self._calm = 0
        """Looks in a row."""

    def observe(self, seen: Observation, in_flight: int) -> str:
        """Moves the cap.

        `in_flight` are this run's requests at the server: before an earlier cut has shown there is no further one. Returns
        why the cap was cut, for a person, or nothing.
        """
        preempted = 0 if self._preemptions is None else seen.preemptions - self._preemptions
        self._preemptions = seen.preemptions
        reason = _overload(seen, preempted)
        self._overloaded = self._overloaded + 1 if reason else 0
        self._calm = self._calm + 1 if not reason and seen.running else 0
        if self._overloaded >= OBSERVATIONS_IN_A_ROW and in_flight <= self.cap:
            self._overloaded = 0
            before, self.cap = self.cap, max(self.floor, int(self.cap * DECREASE_FACTOR))
            return reason if self.cap < before else ""
        if self._calm >= OBSERVATIONS_IN_A_ROW:
            self.cap = min(self.ceiling, self.cap + (FAST_INCREASE if _has_spare_capacity(seen) else SLOW_INCREASE))
        return ""


def _overload(seen: Observation, preempted: int) -> str:
    if preempted > 0:
        return f"{preempted} requests were preempted since the last look"
    if seen.cache_use >= OVERLOADED_CACHE_USE:
        return f"its KV cache is {seen.cache_use:.0%} full"
    if seen.running and seen.waiting > OVERLOADED_QUEUE * seen.running:  # None runs while weights are loaded.
        return f"{seen.waiting} requests wait and {seen.running} run"
    return ""


def _has_spare_capacity(seen: Observation) -> bool:
    return seen.cache_use <= SPARE_CACHE_USE and seen.waiting <= SPARE_QUEUE * seen.running
