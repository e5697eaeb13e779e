"""The loggers that one trial brings along (`Trial.loggers`), for who does not log by a callback of the whole experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counterpoint.tune.callbacks.logger_callback import LoggerCallback
from counterpoint.tune.result import Result
from counterpoint.tune.trial import Trial


class TrialLoggers(LoggerCallback):
    """Makes each trial's loggers at its first result, with `(config, logdir, trial)`, and closes them at its end.

    A logger has `on_result(result)`, and may have `close()`. A trial that goes on after its end gets new ones.
    """

    def __init__(self) -> None:
        self._open: dict[str, list[Any]] = {}

    def on_result(self, trial: Trial, result: Result) -> None:
        """Gives a result to the trial's loggers."""
        if trial.loggers and trial.trial_id not in self._open:
            self._open[trial.trial_id] = [make(trial.config, trial.logdir, trial) for make in trial.loggers]
        for logger in self._open.get(trial.trial_id, ()):
            logger.on_result(result)

    def close(self, trial: Trial) -> None:
        """Closes the trial's loggers, if there are any."""
        for logger in self._open.pop(trial.trial_id, ()):
            if (close := getattr(logger, "close", None)) is not None:
                close()

    def log_trial_result(self, iteration: int, trial: Trial, result: Result, number: int | None) -> None:
        """See `on_result`."""
        self.on_result(trial, result)

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """See `close`."""
        self.close(trial)

    def on_experiment_end(self, trials: Sequence[Trial], **info: Any) -> None:
        """Closes those of trials that were not finished."""
        for trial in trials:
            self.close(trial)
