"""The stoppers of Ray Tune 1.x: by iterations, a plateau of a trial or of the experiment, time, a function, and combined."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from statistics import pstdev
from typing import Any

from counterpoint.tune.errors import TuneError
from counterpoint.tune.result import TRAINING_ITERATION, Result, number_in
from counterpoint.tune.stoppers.stopper import Stopper


class NoopStopper(Stopper):
    """Never stops anything."""


class MaximumIterationStopper(Stopper):
    """Stops a trial at its `max_iter`th iteration, those before a restore included. Raises `TuneError` below 1."""

    def __init__(self, max_iter: int) -> None:
        if max_iter < 1:
            raise TuneError(f"max_iter is {max_iter}; it must be at least 1")
        self._max_iter = max_iter
        self._iterations: dict[str, int] = {}

    def __call__(self, trial_id: str, result: Result) -> bool:
        """Whether the trial has made so many iterations."""
        iteration = result.get(TRAINING_ITERATION)
        if iteration is None:  # it is not told by its runner: count
            iteration = self._iterations[trial_id] = self._iterations.get(trial_id, 0) + 1
        return bool(iteration >= self._max_iter)

    def state(self) -> dict[str, Any]:
        """The counts."""
        return {"iterations": dict(self._iterations)}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes the counts back."""
        self._iterations = dict(state["iterations"])


class TrialPlateauStopper(Stopper):
    """Stops a trial whose last results hardly differ in a metric.

    Args:
        metric: The metric; a result that has no number for it ends no trial.
        std: Below this standard deviation of the last results a trial has plateaued.
        num_results: So many last results are compared.
        grace_period: No trial stops before so many results.
        metric_threshold: No trial stops before its metric is at least (mode max) or at most (mode min) this.
        mode: Needed with `metric_threshold`.

    Raises:
        TuneError: `mode` is neither `min` nor `max`, which a `metric_threshold` needs.
    """

    def __init__(
        self,
        metric: str,
        std: float = 0.01,
        num_results: int = 4,
        grace_period: int = 4,
        metric_threshold: float | None = None,
        mode: str | None = None,
    ) -> None:
        if metric_threshold is not None and mode not in ("min", "max"):
            raise TuneError(f"mode is {mode!r}; with metric_threshold it must be 'min' or 'max'")
        self._metric, self._std, self._num_results = metric, std, num_results
        self._grace_period, self._threshold, self._mode = grace_period, metric_threshold, mode
        self._count: dict[str, int] = {}
        self._last: dict[str, list[float | None]] = {}

    def __call__(self, trial_id: str, result: Result) -> bool:
        """Whether the trial has plateaued."""
        value = number_in(result, self._metric)
        count = self._count[trial_id] = self._count.get(trial_id, 0) + 1
        last = self._last[trial_id] = [*self._last.get(trial_id, []), value][-self._num_results :]
        if count < self._grace_period or len(last) < self._num_results or value is None:
            return False
        if self._threshold is not None and (
            value > self._threshold if self._mode == "min" else value < self._threshold
        ):
            return False
        numbers = [number for number in last if number is not None]
        return len(numbers) == len(last) and pstdev(numbers) < self._std

    def state(self) -> dict[str, Any]:
        """The last values of each trial."""
        return {"count": dict(self._count), "last": {trial_id: list(last) for trial_id, last in self._last.items()}}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes the values back."""
        self._count, self._last = dict(state["count"]), {key: list(last) for key, last in state["last"].items()}


class ExperimentPlateauStopper(Stopper):
    """Stops the experiment when the best results of all trials hardly differ for a while.

    Args:
        metric: The metric; a result that has no number for it is passed over.
        std: At or below this standard deviation of the `top` best values they have plateaued.
        top: So many best values are compared.
        mode: Which are best: `min` or `max`.
        patience: For so many results more than one they must stay so.

    Raises:
        TuneError: An argument is outside its range.
    """

    def __init__(self, metric: str, std: float = 0.001, top: int = 10, mode: str = "min", patience: int = 0) -> None:
        if mode not in ("min", "max"):
            raise TuneError(f"mode is {mode!r}; it must be 'min' or 'max'")
        if top <= 1 or patience < 0 or not std > 0:
            raise TuneError(f"top={top} must be above 1, patience={patience} at least 0, and std={std} above 0")
        self._metric, self._std, self._top, self._mode, self._patience = metric, std, top, mode, patience
        self._best: list[float] = []
        self._since = 0

    def __call__(self, trial_id: str, result: Result) -> bool:
        """Whether the experiment ends with this result."""
        value = number_in(result, self._metric)
        if value is not None:
            self._best = sorted([*self._best, value], reverse=self._mode == "max")[: self._top]
            self._since = self._since + 1 if self._has_plateaued() else 0
        return self.stop_all()

    def stop_all(self) -> bool:
        """Whether the best results have not moved for long enough."""
        return self._has_plateaued() and self._since >= self._patience

    def state(self) -> dict[str, Any]:
        """The best values."""
        return {"best": list(self._best), "since": self._since}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes them back."""
        self._best, self._since = list(state["best"]), state["since"]

    def _has_plateaued(self) -> bool:
        return len(self._best) == self._top and pstdev(self._best) <= self._std


class TimeoutStopper(Stopper):
    """Stops the experiment after so many seconds in which it ran; the time between a kill and the resume does not count.

    Args:
        timeout: Seconds, or a `timedelta`.
        clock: Seconds that only grow.

    Raises:
        TuneError: The timeout is not above 0.
    """

    def __init__(self, timeout: float | timedelta, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        if not (self._budget > 0 and math.isfinite(self._budget)):
            raise TuneError(f"the timeout is {self._budget} seconds; it must be above 0")
        self._spent_before = 0.0
        self._clock = clock
        self._began: float | None = None  # the first question, so that setting up does not count

    def stop_all(self) -> bool:
        """Whether the time is up."""
        if self._began is None:
            self._began = self._clock()
        return self._spent() >= self._budget

    def state(self) -> dict[str, Any]:
        """The seconds that are spent."""
        return {"spent_s": self._spent()}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Goes on counting from there."""
        self._spent_before, self._began = state["spent_s"], None

    def catch_up(self, state: dict[str, Any]) -> None:
        """Goes on counting from there, if it is later."""
        self._spent_before = max(self._spent_before, state["spent_s"])

    def _spent(self) -> float:
        return self._spent_before + (0.0 if self._began is None else self._clock() - self._began)


class FunctionStopper(Stopper):
    """Stops a trial when a function of its id and result says so. The function is not saved: give the same at a resume."""

    def __init__(self, function: Callable[[str, Result], bool]) -> None:
        self._function = function

    def __call__(self, trial_id: str, result: Result) -> bool:
        """What the function says."""
        return bool(self._function(trial_id, result))


class MetricStopper(Stopper):
    """Stops a trial at the first result with one of the metrics at or above its value: what a dict for `stop` means."""

    def __init__(self, criteria: Mapping[str, float]) -> None:
        self._criteria = dict(criteria)

    def __call__(self, trial_id: str, result: Result) -> bool:
        """Whether one is reached."""
        values = {metric: number_in(result, metric) for metric in self._criteria}
        return any(value is not None and value >= self._criteria[metric] for metric, value in values.items())


class CombinedStopper(Stopper):
    """Stops when one of several does. Each hears of every result, also when an earlier one has said stop."""

    def __init__(self, *stoppers: Stopper) -> None:
        self._stoppers = stoppers

    def __call__(self, trial_id: str, result: Result) -> bool:
        """Whether one of them stops the trial."""
        answers = [stopper(trial_id, result) for stopper in self._stoppers]
        return any(answers)

    def stop_all(self) -> bool:
        """Whether one of them stops the experiment."""
        answers = [stopper.stop_all() for stopper in self._stoppers]
        return any(answers)

    def state(self) -> dict[str, Any]:
        """The states of all, in their order."""
        return {"stoppers": [stopper.state() for stopper in self._stoppers]}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Gives each its own; they must be the same in the same order.

        Raises `TuneError` for another number of them.
        """
        if len(state["stoppers"]) != len(self._stoppers):
            raise TuneError(
                f"the experiment had {len(state['stoppers'])} stoppers and now has {len(self._stoppers)}; resume it with the same"
            )
        for stopper, saved in zip(self._stoppers, state["stoppers"], strict=True):
            stopper.restore_state(saved)

    def catch_up(self, state: dict[str, Any]) -> None:
        """Gives each its own."""
        for stopper, saved in zip(self._stoppers, state["stoppers"], strict=True):
            stopper.catch_up(saved)


def as_stopper(stop: Any, time_budget_s: float | timedelta | None = None) -> Stopper:
    """The stopper that a user's `stop` means: a stopper, a function, a dict of metrics, a list of these, or None."""
    if time_budget_s is not None:
        return CombinedStopper(as_stopper(stop), TimeoutStopper(time_budget_s))
    if stop is None:
        return NoopStopper()
    if isinstance(stop, Stopper):
        return stop
    if isinstance(stop, Mapping):
        return MetricStopper(stop)
    if isinstance(stop, list | tuple):
        return CombinedStopper(*(as_stopper(one) for one in stop))
    if hasattr(stop, "stop_all") or not callable(stop):
        raise TuneError(
            f"stop is {stop!r}; it must be a Stopper, a function of trial id and result, a dict of metrics, or a list of these"
        )
    return FunctionStopper(stop)
