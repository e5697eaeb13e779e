"""What `run` says while it runs, by `verbose`: 1 for a line now and then, 2 also for each trial that ends, 3 for each result."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from counterpoint.tune.callbacks.callback import Callback
from counterpoint.tune.errors import in_one_line
from counterpoint.tune.result import TRAINING_ITERATION, Result, lookup, number_in
from counterpoint.tune.trial import Trial

SECONDS = 10.0
"""Seconds between two lines of status."""


class StatusLines(Callback):
    """Writes to standard error."""

    def __init__(
        self, verbose: int, metric: str | None, directory: Path | None = None, mode: str | None = None
    ) -> None:
        self._verbose, self._metric, self._directory, self._mode = verbose, metric, directory, mode
        self._due = time.monotonic() + SECONDS

    def setup(self, *arguments: Any, **info: Any) -> None:
        """Prints where the results will be."""
        if self._verbose >= 1 and self._directory is not None:
            _say(f"results in {self._directory}")

    def say_resumed(self, trials: Sequence[Trial]) -> None:
        """Prints that this goes on with an experiment, with the states that its trials were in."""
        if self._verbose >= 1:
            _say(f"goes on with {self.counts(trials)}")

    def on_step_end(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """Prints a line of status, if it is time."""
        if self._verbose >= 1 and time.monotonic() >= self._due:
            self._due = time.monotonic() + SECONDS
            _say(f"{self.counts(trials)}{self._best(trials)}")

    def on_trial_result(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, result: Result, **info: Any
    ) -> None:
        """A line, if results are asked for."""
        if self._verbose >= 3:
            _say(f"{trial}: iteration {result.get(TRAINING_ITERATION)}{self._value(result)}")

    def on_trial_complete(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """A line, if ends are asked for."""
        if self._verbose >= 2:
            _say(f"{trial} ended after {trial.num_results} results{self._value(trial.last_result)}")

    def on_trial_fail(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """A line, unless silence is asked for."""
        if self._verbose >= 1:
            _say(f"{trial} failed, see {trial.error_file}: {in_one_line(trial.error_msg) or 'no reason given'}")

    def on_experiment_end(self, trials: Sequence[Trial], **info: Any) -> None:
        """The last line of status."""
        if self._verbose >= 1:
            _say(f"{self.counts(trials)}{self._best(trials)}")

    @staticmethod
    def counts(trials: Sequence[Trial]) -> str:
        """Returns how many trials have each status."""
        counts = Counter(trial.status for trial in trials)
        return f"{len(trials)} trials: " + ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))

    def _best(self, trials: Sequence[Trial]) -> str:
        """The best of the last results, of those that are finite numbers."""
        if self._metric is None or self._mode is None:
            return ""
        values = [(number_in(trial.last_result, self._metric), trial) for trial in trials]
        known = [(value, trial) for value, trial in values if value is not None]
        if not known:
            return ""
        value, trial = (min if self._mode == "min" else max)(known, key=lambda one: one[0])
        return f"; best {self._metric} = {value:.6g}, {trial}"

    def _value(self, result: Result) -> str:
        return "" if self._metric is None else f", {self._metric} = {lookup(result, self._metric)}"


def _say(line: str) -> None:
    sys.stderr.write(f"tune: {line}\n")
