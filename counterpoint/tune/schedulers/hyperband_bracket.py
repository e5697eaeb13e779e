"""A bracket of HyperBand: trials that are halved together at times that grow by the reduction factor. Names trials by id."""

from __future__ import annotations

import math
from typing import Any

from counterpoint.tune.schedulers.metric_scheduler import number_from_json, number_to_json


class Bracket:
    """Trials run to `milestone` and wait there for each other; then `1 / eta` of the places remain, for `eta` times as long.

    `s` says how many halvings there are; the last milestone is `max_t`.
    """

    def __init__(self, s: int, rounds: int, max_t: float, eta: float, stop_last_trials: bool) -> None:
        self.s = s
        self._max_t = max_t
        self._eta = eta
        self._stop_last_trials = stop_last_trials
        self.places = math.ceil(rounds / (s + 1) * eta**s)
        self.milestone = first_milestone(s, max_t, eta)
        self.halvings = s
        self.live: dict[str, tuple[float, float] | None] = {}
        """Time and score of the last result of each trial, None before the first, in the order in which they joined."""
        self._progress = 0.0
        self._work = self._total_work()

    def filled(self) -> bool:
        """Whether the next trial needs another bracket."""
        return len(self.live) == self.places

    def observe(self, trial_id: str, time: float, score: float) -> None:
        """Takes a result of a live trial."""
        self._progress += time - self._time(trial_id)
        self.live[trial_id] = time, score

    def goes_on(self, trial_id: str) -> bool:
        """Whether a live trial may run now: it has not come to the milestone, or there is none after the last."""
        return (self.halvings == 0 and not self._stop_last_trials) or self._time(trial_id) < self.milestone

    def waits(self) -> bool:
        """Whether all its trials have come to the milestone, so that something must be decided."""
        return bool(self.live) and not any(self.goes_on(trial_id) for trial_id in self.live)

    def halve(self) -> list[str]:
        """Moves the milestone on and drops the trials for which there is no place any more. Returns them, worst first."""
        self.halvings -= 1
        self.places = math.ceil(self.places / self._eta)
        self.milestone = int(min(self.milestone * self._eta, self._max_t))
        worst_first = sorted(self.live, key=self._rank)
        dropped = worst_first[: -self.places]
        for trial_id in dropped:
            del self.live[trial_id]
        return dropped

    def completion(self) -> float:
        """How much of its work is done, from 0 to 1, roughly: brackets that are behind go first."""
        if self.halvings == 0 and self.waits():
            return 1.0
        return min(self._progress / self._work, 1.0)

    def _time(self, trial_id: str) -> float:
        last = self.live[trial_id]
        return 0 if last is None else last[0]

    def _rank(self, trial_id: str) -> float:
        last = self.live[trial_id]
        return -math.inf if last is None or math.isnan(last[1]) else last[1]

    def _total_work(self) -> int:
        """An estimate, which is the same as Ray's so that brackets take turns alike."""
        work, trials, span = 0, self.places, self.milestone
        for _ in range(self.s + 1):
            work += trials * span
            trials = math.ceil(trials / self._eta)
            span = int(min(span * self._eta, self._max_t - self.milestone))
        return work

    def __str__(self) -> str:
        return f"{len(self.live)} of {self.places} trials to {self.milestone:g} ({self.completion():.0%})"

    def state(self) -> dict[str, Any]:
        """All that changes, as JSON values."""
        return {
            "s": self.s,
            "places": self.places,
            "milestone": self.milestone,
            "halvings": self.halvings,
            "progress": self._progress,
            "live": {trial_id: last and [last[0], number_to_json(last[1])] for trial_id, last in self.live.items()},
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned, in a bracket of the same `s`."""
        self.places, self.milestone, self.halvings = state["places"], state["milestone"], state["halvings"]
        self._progress = state["progress"]
        self.live = {
            trial_id: None if last is None else (last[0], number_from_json(last[1]))
            for trial_id, last in state["live"].items()
        }


def first_milestone(s: int, max_t: float, eta: float) -> int:
    """The time to which the trials of a bracket run before the first halving; a bracket with 0 is left out."""
    return int(max_t * eta**-s)
