"""Who is there: what rank 0 knows of each run's orchestrator, and when the trainer has nobody left to wait for. Pure.

Places are another matter (`trainer/runs/slot_plan.py`); this says whose orchestrator is present, and which runs have ended. Times
are of one monotonic clock, in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True)
class _Standing:
    present: bool = False
    unreachable_since: float = math.inf
    patience: float = math.inf
    """How long an orchestrator that cannot be reached still counts as present."""
    trained: bool = False
    """Whether the run has ever had a place: the trainer's end depends on these alone."""
    ended: Literal["evicted", "deleted"] | None = None
    farewell_before: float = math.inf
    """Of a run that is trained to its end: when its orchestrator's `BYE` is not waited for any longer."""


class Presence:
    """The orchestrators of all runs, by run id."""

    def __init__(self) -> None:
        self._standings: dict[str, _Standing] = {}

    def called(self, run_id: str) -> None:
        """Its orchestrator has said `HELLO`."""
        standing = self._standing(run_id)
        standing.present, standing.unreachable_since = True, math.inf

    def left(self, run_id: str, now: float) -> None:
        """Its orchestrator has said `BYE`."""
        standing = self._standing(run_id)
        standing.present = False
        if standing.farewell_before < math.inf:
            standing.farewell_before = now
        self._forget_stranger(run_id)

    def sent_away(self, run_id: str) -> None:
        """Its orchestrator was told that the run is not trained as it is, or cannot be reached to be told to wait; it may come
        back."""
        standing = self._standing(run_id)
        standing.present, standing.farewell_before = False, math.inf
        self._forget_stranger(run_id)

    def unreachable(self, run_id: str, now: float, patience: float) -> None:
        """A message did not reach it; killed, it may come back. Counts as present for `patience` seconds."""
        standing = self._standing(run_id)
        standing.unreachable_since = min(standing.unreachable_since, now)
        standing.patience = patience

    def admitted(self, run_id: str) -> None:
        """The run has a place and goes on."""
        standing = self._standing(run_id)
        standing.trained, standing.ended, standing.farewell_before = True, None, math.inf

    def finished(self, run_id: str, farewell_before: float) -> None:
        """The run is trained to its end. An orchestrator that missed the acknowledgement, killed at that very moment, has until
        then to come for it."""
        standing = self._standing(run_id)
        standing.trained, standing.ended, standing.farewell_before = True, None, farewell_before

    def removed(self, run_id: str, how: Literal["evicted", "deleted"]) -> None:
        """The run is not trained any more."""
        self._standing(run_id).ended = how

    def present(self, now: float) -> set[str]:
        """Runs whose orchestrators are there."""
        return {
            run_id
            for run_id, standing in self._standings.items()
            if standing.present and now - standing.unreachable_since <= standing.patience
        }

    def ended(self, run_id: str) -> Literal["evicted", "deleted"] | None:
        """How a run ended that is not trained any more."""
        standing = self._standings.get(run_id)
        return standing.ended if standing is not None else None

    def over(self, now: float) -> bool:
        """Whether every run that has had a place has ended, and there was one."""
        known = [standing for standing in self._standings.values() if standing.trained]
        return bool(known) and all(each.ended is not None or now >= each.farewell_before for each in known)

    def all_evicted(self) -> bool:
        """Whether every run that has had a place was evicted, and there was one."""
        known = [standing for standing in self._standings.values() if standing.trained]
        return bool(known) and all(each.ended == "evicted" for each in known)

    def _forget_stranger(self, run_id: str) -> None:
        """Of names that are called once, any number may come."""
        if not self._standing(run_id).trained:
            del self._standings[run_id]

    def _standing(self, run_id: str) -> _Standing:
        return self._standings.setdefault(run_id, _Standing())
