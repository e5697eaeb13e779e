"""`ExperimentTelemetry`: what the tuner shows to Prometheus, heard as a callback. Its metrics are here."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from counterpoint.transport.telemetry.endpoint import MetricsEndpoint, as_user_error
from counterpoint.transport.telemetry.metric import Metric, Process
from counterpoint.tune.callbacks.callback import Callback
from counterpoint.tune.config import TuneConfig
from counterpoint.tune.result import Result, number_in
from counterpoint.tune.runner.trial_runner import TrialRunner
from counterpoint.tune.trial import Trial

TRIALS = Metric("counterpoint_tune_trials", "gauge", "trials by status", labels=("status",))
BEST = Metric("counterpoint_tune_best_score", "gauge", "best value of the metric that is compared", labels=("metric",))
RESULTS = Metric("counterpoint_tune_results", "counter", "results that trials have reported")
EVENTS = Metric(
    "counterpoint_tune_events",
    "counter",
    "what happened to trials: start, restore, save, complete (also when it is stopped early), recover, fail",
    labels=("event",),
)
ITERATIONS = Metric("counterpoint_tune_loop_iterations", "counter", "iterations of the tuner's loop")

TUNE = Process(
    "tune",
    "Tune",
    "`counterpoint tune`. Its port is `prometheus_port` of the experiment's file, its discovery file in the experiment's "
    "directory.",
    {"experiment": "its name"},
    (TRIALS, BEST, RESULTS, EVENTS, ITERATIONS),
)

COUNT_SECONDS = 1.0
"""Shortest time between two counts of all trials: with thousands of them, a count costs more than a step of the loop."""

STATUSES = (Trial.PENDING, Trial.RUNNING, Trial.PAUSED, Trial.TERMINATED, Trial.ERROR)


def _counting(event: str) -> Callable[..., None]:
    """Returns the method of a callback that counts an event."""

    def count(self: ExperimentTelemetry, **info: Any) -> None:
        self._values.add(EVENTS, 1, event)

    return count


class ExperimentTelemetry(Callback):
    """The endpoint of a tuner."""

    def __init__(self, config: TuneConfig, directory: Path) -> None:
        self._config, self._directory = config, directory
        self._endpoint = MetricsEndpoint(config.prometheus_port, TUNE, {"experiment": config.name})
        self._values = self._endpoint.values
        self._best: float | None = None
        self._counted = -math.inf

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._endpoint.port

    @contextmanager
    def of(self, runner: TrialRunner) -> Iterator[None]:
        """Serves during the block, and hears what the runner does. Raises `UserError` if the port cannot be had."""
        with ExitStack() as stack:
            try:
                stack.enter_context(self._endpoint)
            except OSError as error:
                raise as_user_error(error) from None
            self._endpoint.write_target(self._directory)
            for trial in runner.get_trials():
                if trial.last_result:
                    self._heed(trial.last_result)
            self._count(runner.get_trials())
            # Last, so that the callbacks of an experiment that is resumed keep their places.
            runner.callbacks.callbacks.append(self)
            yield

    def on_step_end(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """Counts the trials now and then."""
        self._values.add(ITERATIONS, 1)
        if time.monotonic() - self._counted >= COUNT_SECONDS:
            self._count(trials)

    def on_trial_result(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, result: Result, **info: Any
    ) -> None:
        """Counts the result and compares it."""
        self._values.add(RESULTS, 1)
        self._heed(result)

    on_trial_start = _counting("start")
    on_trial_restore = _counting("restore")
    on_trial_save = _counting("save")
    on_trial_complete = _counting("complete")
    on_trial_recover = _counting("recover")
    on_trial_fail = _counting("fail")

    def on_experiment_end(self, trials: Sequence[Trial], **info: Any) -> None:
        """Counts the trials a last time."""
        self._count(trials)

    def _count(self, trials: Sequence[Trial]) -> None:
        self._counted = time.monotonic()
        statuses = Counter(dict.fromkeys(STATUSES, 0))
        statuses.update(trial.status for trial in trials)
        self._values.replace("trials", {(TRIALS, (status,)): number for status, number in statuses.items()})

    def _heed(self, result: Result) -> None:
        if (score := number_in(result, self._config.metric)) is None:
            return
        better = max if self._config.mode == "max" else min
        self._best = score if self._best is None else better(self._best, score)
        self._values.set(BEST, self._best, self._config.metric)
