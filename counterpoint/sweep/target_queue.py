"""The order in which one worker tries its targets: as given, pass after pass over those that are still open. Pure.

Outcomes in (`done`, `failed`, `later`), steps out (`next`). `counterpoint/sweep/claim.py` carries the steps out.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

FIRST_WAIT_SECONDS = 0.1
"""First pause between two passes, for each open target: an idle worker then reads at most 20 records a second."""


class Backoff:
    """The pause between two passes over targets that peers hold: short at first, then doubled, up to a heartbeat.

    So the end of a peer's target is noticed after at most twice the time that the target took, and a target that takes hours
    is checked once a heartbeat.
    """

    def __init__(self, heartbeat: float, chance: random.Random) -> None:
        self._heartbeat = heartbeat
        self._chance = chance
        self._looks = 0

    def reset(self) -> None:
        """Shortens the pause after a change, since others may follow."""
        self._looks = 0

    def next_pause(self, targets: int, soonest: float) -> float:
        """Returns the next pause in seconds, with jitter: workers that wait for the same target would otherwise collide.

        `targets` is the number of targets that a pass checks. None of them changes before `soonest` unless a peer ends it.
        """
        first = min(FIRST_WAIT_SECONDS * targets, self._heartbeat)
        pause = min(first * 2.0 ** min(self._looks, 32), self._heartbeat)
        self._looks += 1
        return min(max(soonest, first), pause) * self._chance.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Try:
    """Claim this target, and run it if the claim succeeds."""

    target_id: str


@dataclass(frozen=True, slots=True)
class WaitSeconds:
    """Do nothing for so many seconds."""

    seconds: float


class TargetQueue:
    """Chooses the next target.

    Every `Try` is answered by one of the three outcomes before `next` is called again.
    """

    def __init__(self, target_ids: Iterable[str], heartbeat: float, chance: random.Random) -> None:
        self._this_pass = deque(target_ids)
        self._next_pass: list[str] = []
        self._soonest = math.inf
        self._backoff = Backoff(heartbeat, chance)
        self.failures: dict[str, Exception] = {}
        """The targets that stay failed, with their errors."""

    def next(self) -> Try | WaitSeconds | None:
        """Returns the next step; None when no target is open any more."""
        if self._this_pass:
            return Try(self._this_pass.popleft())
        if not self._next_pass:
            return None
        seconds = self._backoff.next_pause(len(self._next_pass), self._soonest)
        self._this_pass.extend(self._next_pass)
        self._next_pass.clear()
        self._soonest = math.inf
        return WaitSeconds(seconds)

    def done(self, target_id: str) -> None:
        """Notes that the target reads SUCCESS."""
        self._backoff.reset()

    def failed(self, target_id: str, error: Exception) -> None:
        """Notes that the target is not tried again."""
        self.failures[target_id] = error
        self._backoff.reset()

    def later(self, target_id: str, seconds: float) -> None:
        """Notes that the target may change in so many seconds: a peer holds it, or it pauses."""
        self._next_pass.append(target_id)
        self._soonest = min(self._soonest, seconds)
