"""The median stopping rule: a trial stops if its best score is below the median of the others' means up to the same time.

Golovin et al., Google Vizier (https://research.google.com/pubs/pub46180.html). The median is over all trials at a time that is
this result's own, so a result costs O(n log r) for n trials of r results.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from statistics import median
from typing import Any

from counterpoint.tune.result import Result
from counterpoint.tune.schedulers.metric_scheduler import MetricScheduler, number_from_json, number_to_json
from counterpoint.tune.schedulers.scheduler import Trials
from counterpoint.tune.trial import Trial


class MedianStoppingRule(MetricScheduler):
    """Stops trials that are worse than the median.

    Nothing is stopped before `grace_period`, nor with fewer than `min_samples_required` other trials that have come as far. While
    there are too few, the trial yields to those that wait, once in every `min_time_slice`. With `hard_stop=False` a trial is
    paused rather than stopped, and runs to its end when nothing else is left.
    """

    def __init__(
        self,
        time_attr: str = "time_total_s",
        metric: str | None = None,
        mode: str | None = None,
        grace_period: float = 60.0,
        min_samples_required: int = 3,
        min_time_slice: float = 0,
        hard_stop: bool = True,
    ) -> None:
        super().__init__(time_attr, metric, mode)
        self._grace_period = grace_period
        self._min_samples_required = min_samples_required
        self._min_time_slice = min_time_slice
        self._hard_stop = hard_stop
        self._history: dict[str, _History] = {}
        self._last_pause: dict[str, float] = {}
        self._stopped: set[str] = set()

    def on_trial_result(self, trials: Trials, trial: Trial, result: Result) -> str:
        """Compares the trial with the others at its time."""
        observed = self.observed(result)
        if observed is None:
            return self.CONTINUE
        if trial.trial_id in self._stopped:
            return self.STOP if self._hard_stop else self.CONTINUE
        time, score = observed
        history = self._record(trial, time, score)
        if time < self._grace_period:
            return self.CONTINUE
        means = [other.mean(time) for other in self._history.values() if other is not history and other.reaches(time)]
        known = [mean for mean in means if math.isfinite(mean)]
        if not known or len(known) < self._min_samples_required:
            return self._yield_or_continue(trials, trial, time)
        if history.best() >= median(known):
            return self.CONTINUE
        self._stopped.add(trial.trial_id)
        return self.STOP if self._hard_stop else self.PAUSE

    def on_trial_complete(self, trials: Trials, trial: Trial, result: Result) -> None:
        """Counts the last result for the others."""
        observed = self.observed(result)
        if observed is not None:
            self._record(trial, *observed)

    def _record(self, trial: Trial, time: float, score: float) -> _History:
        history = self._history.setdefault(trial.trial_id, _History(self._grace_period))
        history.add(time, score)
        return history

    def _yield_or_continue(self, trials: Trials, trial: Trial, time: float) -> str:
        others_wait = trials.with_status(Trial.PENDING) or trials.with_status(Trial.PAUSED)
        if not others_wait or time - self._last_pause.get(trial.trial_id, -math.inf) <= self._min_time_slice:
            return self.CONTINUE
        self._last_pause[trial.trial_id] = time
        return self.PAUSE

    def debug_string(self) -> str:
        """How many were stopped."""
        return f"{self.name}: {len(self._stopped)} stopped"

    def state(self) -> dict[str, Any]:
        """All scores by time, and who was stopped or paused."""
        return {
            "history": {trial_id: history.state() for trial_id, history in self._history.items()},
            "last_pause": dict(self._last_pause),
            "stopped": sorted(self._stopped),
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned."""
        self._history = {}
        for trial_id, results in state["history"].items():
            self._history[trial_id] = _History(self._grace_period)
            for time, score in results:
                self._history[trial_id].add(time, number_from_json(score))
        self._last_pause = dict(state["last_pause"])
        self._stopped = set(state["stopped"])


class _History:
    """The scores of a trial in order of time, with running sums and the best so far.

    A trial that goes on from an older checkpoint reports times again: the new results replace those from there on.
    """

    def __init__(self, grace_period: float) -> None:
        self._grace_period = grace_period
        self._times: list[float] = []
        self._scores: list[float] = []
        self._sums: list[float] = []
        self._bests: list[float] = []

    def add(self, time: float, score: float) -> None:
        """Takes a result."""
        place = bisect_left(self._times, time)
        for column in (self._times, self._scores, self._sums, self._bests):
            del column[place:]
        self._times.append(time)
        self._scores.append(score)
        counts = time >= self._grace_period
        self._sums.append((self._sums[-1] if self._sums else 0.0) + (score if counts else 0.0))
        best = self.best()
        self._bests.append(best if math.isnan(score) else max(best, score))

    def reaches(self, time: float) -> bool:
        """Whether the trial has come to this time."""
        return bool(self._times) and self._times[-1] >= time

    def mean(self, time: float) -> float:
        """The mean from the grace period to this time; NaN if nothing was reported in between."""
        first, end = bisect_left(self._times, self._grace_period), bisect_right(self._times, time)
        return self._sums[end - 1] / (end - first) if end > first else math.nan

    def best(self) -> float:
        """The best score so far; NaN is none."""
        return self._bests[-1] if self._bests else -math.inf

    def state(self) -> list[list[Any]]:
        """Times and scores."""
        return [[time, number_to_json(score)] for time, score in zip(self._times, self._scores, strict=True)]
