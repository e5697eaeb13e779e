"""The order in which one worker tries its targets: in the order given, pass after pass over what is still open. Pure.

Outcomes in (`done`, `failed`, `later`), steps out (`next`). `sweep/claim.py` carries the steps out.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

SHORTEST_REST = 1 / 20
"""Of a heartbeat, between two passes."""


@dataclass(frozen=True, slots=True)
class Try:
    """Claim this one, and run it if it is ours."""

    target_id: str


@dataclass(frozen=True, slots=True)
class Rest:
    """Do nothing for so long."""

    seconds: float


class Walk:
    """Which target next. Every `Try` is answered by one of the three outcomes before `next` is asked again."""

    def __init__(self, target_ids: Iterable[str], heartbeat: float, chance: random.Random) -> None:
        self._this_pass = deque(target_ids)
        self._next_pass: list[str] = []
        self._soonest = heartbeat
        self._heartbeat = heartbeat
        self._chance = chance
        self.failures: dict[str, Exception] = {}
        """What stays failed, and why."""

    def next(self) -> Try | Rest | None:
        """The next step; None when no target is open any more."""
        if self._this_pass:
            return Try(self._this_pass.popleft())
        if not self._next_pass:
            return None
        # Workers that wait for the same thing would otherwise all look at the same moment.
        seconds = max(self._soonest, self._heartbeat * SHORTEST_REST) * self._chance.uniform(0.5, 1.0)
        self._this_pass.extend(self._next_pass)
        self._next_pass.clear()
        self._soonest = self._heartbeat
        return Rest(seconds)

    def done(self, target_id: str) -> None:
        """It reads SUCCESS."""

    def failed(self, target_id: str, error: Exception) -> None:
        """It is not tried again."""
        self.failures[target_id] = error

    def later(self, target_id: str, seconds: float) -> None:
        """It may be worth a look in so many seconds: a peer has it, or it rests."""
        self._next_pass.append(target_id)
        self._soonest = min(self._soonest, seconds)
