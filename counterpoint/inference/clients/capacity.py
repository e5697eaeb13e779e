"""The cap on requests in flight at one server: raised while the server keeps up, cut when it is overloaded. Pure.

Additive increase, multiplicative decrease. Every run's orchestrator has a controller of its own for each server, and they
exchange nothing; but they observe the same server, and if all rise by the same amount and fall by the same share, they
approach equal caps (D.-M. Chiu and R. Jain, "Analysis of the Increase and Decrease Algorithms for Congestion Avoidance in
Computer Networks", 1989). `load_report` reads the observations, the server monitor passes them on.
"""

from __future__ import annotations

from dataclasses import dataclass

FAST_INCREASE, SLOW_INCREASE = 8, 1
"""Requests added at an observation of a server with spare capacity, and of one that is merely not overloaded. The same for every
run, whatever its ceiling, and never 0: shares become equal by repeated cuts."""

DECREASE_FACTOR = 0.75
"""The share of the cap that remains after a cut."""

LOWEST_CAP = 4
"""The least cap after a cut: with fewer requests a run would not notice that the server has recovered."""

OBSERVATIONS_IN_A_ROW = 2
"""Observations that must agree before the cap changes: a step begins with a burst, which is over at the next one."""

OVERLOADED_CACHE_USE, SPARE_CACHE_USE = 0.95, 0.85
"""KV-cache use from which a server counts as overloaded, and up to which it has spare capacity."""

OVERLOADED_QUEUE, SPARE_QUEUE = 1.5, 0.5
"""The same limits for waiting requests per running one. One waiting batch keeps an engine busy; more makes rollouts stale."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A server's load as it reports it, all runs together."""

    cache_use: float
    """Share of the KV cache that running requests hold, 0 to 1."""
    running: int
    """The requests that are being computed."""
    waiting: int
    """Requests that wait for room, not those that wait for a slot of their adapter."""
    preemptions: int
    """Requests evicted from the KV cache, to be computed again, since the server's start."""
    held: int = 0
    """All requests that it has, those included that wait for a slot of their adapter."""
    tokens: int = 0
    """Tokens prefilled or generated since the server's start."""


class CapacityController:
    """The cap of one run at one server: `floor <= cap <= ceiling`.

    It begins halfway, so that a new run does not flood the server.
    """

    def __init__(self, ceiling: int) -> None:
        self.ceiling = ceiling
        self.floor = min(LOWEST_CAP, ceiling)
        self.cap = max(self.floor, ceiling // 2)
        self._preemptions: int | None = None
        self._overloaded = 0
        self._calm = 0
        """Observations in a row without overload."""

    def observe(self, seen: Observation, in_flight: int) -> str:
        """Changes the cap; returns why it was cut, for a person, or an empty string.

        `in_flight` is the number of this run's requests at the server: no further cut is made before an earlier one has
        taken effect.
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
        return f"{preempted} requests were preempted since the last observation"
    if seen.cache_use >= OVERLOADED_CACHE_USE:
        return f"its KV cache is {seen.cache_use:.0%} full"
    if seen.running and seen.waiting > OVERLOADED_QUEUE * seen.running:  # None runs while weights are loaded.
        return f"{seen.waiting} requests wait and {seen.running} run"
    return ""


def _has_spare_capacity(seen: Observation) -> bool:
    return seen.cache_use <= SPARE_CACHE_USE and seen.waiting <= SPARE_QUEUE * seen.running
