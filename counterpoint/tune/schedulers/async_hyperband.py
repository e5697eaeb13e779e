"""Asynchronous successive halving (ASHA): a trial that is behind when it reaches a milestone stops there. Nobody waits.

Li et al., A System for Massively Parallel Hyperparameter Tuning (https://arxiv.org/abs/1810.05934). A result costs O(log n).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from heapq import heappush, heapreplace
from itertools import accumulate
from typing import Any

from counterpoint.tune.result import Result
from counterpoint.tune.schedulers.metric_scheduler import (
    MetricScheduler,
    draws_from_json,
    draws_to_json,
    number_from_json,
    number_to_json,
)
from counterpoint.tune.schedulers.scheduler import Trials
from counterpoint.tune.trial import Trial


class AsyncHyperBandScheduler(MetricScheduler):
    """Stops trials early, by rungs.

    At `grace_period`, and at each later time that is `reduction_factor` times the one before, a trial goes on only if its score
    is not below the quantile `1 - 1 / reduction_factor` of those that came to this rung before it. It is compared once a rung;
    a trial whose time jumps over several rungs, at the last one. With several `brackets` each trial is put into one at random;
    bracket `s` leaves out the first `s` rungs, and is the less likely the fewer rungs it has.
    """

    def __init__(
        self,
        time_attr: str = "training_iteration",
        metric: str | None = None,
        mode: str | None = None,
        max_t: float = 100,
        grace_period: float = 1,
        reduction_factor: float = 4,
        brackets: int = 1,
        stop_last_trials: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(time_attr, metric, mode)
        self.require(max_t > 0, f"max_t is {max_t}; expected more than 0")
        self.require(grace_period > 0, f"grace_period is {grace_period}; expected more than 0")
        self.require(max_t >= grace_period, f"grace_period is {grace_period}; expected at most max_t, {max_t}")
        self.require(reduction_factor > 1, f"reduction_factor is {reduction_factor}; expected more than 1")
        self.require(brackets > 0, f"brackets is {brackets}; expected more than 0")
        self._max_t = max_t
        self._stop_last_trials = stop_last_trials
        self._brackets = [_Bracket(grace_period, max_t, reduction_factor, s) for s in range(brackets)]
        sizes = [len(bracket.milestones) for bracket in self._brackets]
        self._likelihood = list(accumulate(math.exp(size - max(sizes)) for size in sizes))
        self._random = random.Random(seed)
        self._num_stopped = 0
        self._place: dict[str, tuple[int, int]] = {}
        """The bracket of each live trial, and how many rungs it has behind it."""

    def on_trial_add(self, trials: Trials, trial: Trial) -> None:
        """Puts the trial into a bracket."""
        super().on_trial_add(trials, trial)
        draw = self._random.random() * self._likelihood[-1]
        self._place[trial.trial_id] = min(bisect_right(self._likelihood, draw), len(self._brackets) - 1), 0

    def on_trial_result(self, trials: Trials, trial: Trial, result: Result) -> str:
        """Stops the trial at `max_t`, or at a rung at which it is behind."""
        observed = self.observed(result)
        if observed is None:
            return self.CONTINUE
        if trial.trial_id not in self._place:  # It was stopped already, and has not heard of it.
            return self.STOP
        passes = self._passes(trial, *observed)
        if passes and not (observed[0] >= self._max_t and self._stop_last_trials):
            return self.CONTINUE
        self._num_stopped += 1
        del self._place[trial.trial_id]
        return self.STOP

    def on_trial_complete(self, trials: Trials, trial: Trial, result: Result) -> None:
        """Counts the last result for the others, and forgets the trial, unless it was stopped here."""
        observed = self.observed(result)
        if observed is not None and trial.trial_id in self._place:
            self._passes(trial, *observed)
        self._place.pop(trial.trial_id, None)

    def on_trial_remove(self, trials: Trials, trial: Trial) -> None:
        """Forgets the trial."""
        self._place.pop(trial.trial_id, None)

    def _passes(self, trial: Trial, time: float, score: float) -> bool:
        """Whether the trial goes on, once it is recorded at the rung that it has reached."""
        index, behind = self._place[trial.trial_id]
        bracket = self._brackets[index]
        reached = bisect_right(bracket.milestones, time)
        if reached <= behind:
            return True
        self._place[trial.trial_id] = index, reached
        return bracket.rungs[reached - 1].passes(score)

    def debug_string(self) -> str:
        """How many were stopped, and the cutoff of each rung."""
        brackets = (
            " | ".join(f"{time:g}: {rung.cutoff()}" for time, rung in zip(b.milestones, b.rungs, strict=True))
            for b in self._brackets
        )
        return f"{self.name}: {self._num_stopped} stopped; cutoffs {'; '.join(brackets)}"

    def state(self) -> dict[str, Any]:
        """Rungs, places and draws."""
        return {
            "brackets": [[rung.scores.state() for rung in bracket.rungs] for bracket in self._brackets],
            "place": {trial_id: list(place) for trial_id, place in self._place.items()},
            "random": draws_to_json(self._random),
            "num_stopped": self._num_stopped,
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned."""
        for bracket, saved in zip(self._brackets, state["brackets"], strict=True):
            for rung, scores in zip(bracket.rungs, saved, strict=True):
                rung.scores.restore_state(scores)
        self._place = {trial_id: (place[0], place[1]) for trial_id, place in state["place"].items()}
        draws_from_json(self._random, state["random"])
        self._num_stopped = state["num_stopped"]


ASHAScheduler = AsyncHyperBandScheduler


class _Bracket:
    """The rungs from the `s`-th on, and their times in order."""

    def __init__(self, grace_period: float, max_t: float, factor: float, s: int) -> None:
        count = int(math.log(max_t / grace_period) / math.log(factor) - s + 1)
        self.milestones = [grace_period * factor ** (k + s) for k in range(count)]
        self.rungs = [_Rung(factor) for _ in self.milestones]


class _Rung:
    """The scores of the trials that have come to one milestone."""

    def __init__(self, factor: float) -> None:
        self.scores = RunningQuantile(1 - 1 / factor)

    def cutoff(self) -> float | None:
        """The score below which the next trial stops; None for the first."""
        return self.scores.value()

    def passes(self, score: float) -> bool:
        """Whether a score holds against those before it, to which it is added. NaN holds only against none."""
        cutoff = self.cutoff()
        if math.isnan(score):
            return cutoff is None
        self.scores.add(score)
        return cutoff is None or score >= cutoff


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
