"""What loggers have in common. As `LoggerCallback` in Ray Tune 1.x: it names the events that concern what a trial's files hold.

Line n of a file is result n of the trial (`NumberedLines`). A resumed runner tells again what it has journalled since its last
snapshot, with the same numbers, so that what was lost in a kill is written then, and nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counterpoint.tune.callbacks.callback import Callback
from counterpoint.tune.result import Result
from counterpoint.tune.trial import Trial


class LoggerCallback(Callback):
    """A callback that writes results. Subclasses need only the `log_` methods."""

    def log_trial_start(self, trial: Trial) -> None:
        """A trial has started."""

    def log_trial_restore(self, trial: Trial) -> None:
        """A trial has begun from a checkpoint, perhaps with a new configuration."""

    def log_trial_save(self, trial: Trial) -> None:
        """A checkpoint of the trial is durable."""

    def log_trial_result(self, iteration: int, trial: Trial, result: Result, number: int | None) -> None:
        """A trial has reported; `number` counts its results from 1, None if unknown."""

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """A trial has ended; close what is open for it."""

    def on_trial_start(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """See `log_trial_start`."""
        self.log_trial_start(trial)

    def on_trial_restore(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """See `log_trial_restore`."""
        self.log_trial_restore(trial)

    def on_trial_save(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, checkpoint: Any, **info: Any
    ) -> None:
        """See `log_trial_save`."""
        self.log_trial_save(trial)

    def on_trial_result(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, result: Result, **info: Any
    ) -> None:
        """See `log_trial_result`."""
        self.log_trial_result(iteration, trial, result, info.get("number"))

    def on_trial_complete(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """See `log_trial_end`."""
        self.log_trial_end(trial)

    def on_trial_fail(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """See `log_trial_end`."""
        self.log_trial_end(trial, failed=True)
