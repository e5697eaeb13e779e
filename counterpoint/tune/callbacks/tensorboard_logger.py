"""Writes each trial's numbers for TensorBoard into its directory (extra `tensorboard`), named `ray/tune/...` as Ray Tune does.

TensorBoard thus shows experiments of both side by side. After a resume the new file says from which step on it
replaces the older ones.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from counterpoint.job.tracking.event_files import library, open_writer
from counterpoint.tune.callbacks.logger_callback import LoggerCallback
from counterpoint.tune.errors import TuneError
from counterpoint.tune.result import TIME_TOTAL_S, TIMESTEPS_TOTAL, TRAINING_ITERATION, Result, flattened
from counterpoint.tune.trial import Trial

_NOT_SHOWN = {"config", "pid", "timestamp", TIME_TOTAL_S, TRAINING_ITERATION}
_PREFIX = "ray/tune/"


class TBXLoggerCallback(LoggerCallback):
    """Writes `events.out.tfevents.*`: numbers as scalars, lists of numbers as histograms, and the parameters at the end.

    Raises `TuneError` without the extra `tensorboard`.
    """

    def __init__(self) -> None:
        try:
            library()
        except ImportError as error:
            raise TuneError(
                "TBXLoggerCallback needs the extra `tensorboard`: pip install 'counterpoint[tensorboard]'"
            ) from error
        self._writers: dict[str, Any] = {}
        self._last: dict[str, dict[str, float]] = {}

    def log_trial_result(self, iteration: int, trial: Trial, result: Result, number: int | None) -> None:
        """Adds the result's numbers at its `timesteps_total`, or else its `training_iteration`."""
        step = result.get(TIMESTEPS_TOTAL) or result.get(TRAINING_ITERATION) or number
        writer = self._writers.get(trial.trial_id)
        if writer is None:
            writer = self._writers[trial.trial_id] = open_writer(Path(trial.logdir), step)
        shown = {key: value for key, value in result.items() if key not in _NOT_SHOWN}
        numbers = {_PREFIX + name: value for name, value in flattened(shown).items() if _is_number(value)}
        for name, value in numbers.items():
            writer.add_scalar(name, value, global_step=step)
        for name, value in flattened(shown).items():
            if isinstance(value, list) and value and all(map(_is_number, value)):
                writer.add_histogram(_PREFIX + name, value, global_step=step)
        writer.flush()
        self._last[trial.trial_id] = numbers

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Writes the parameters beside the last numbers, and closes the file."""
        writer, numbers = self._writers.pop(trial.trial_id, None), self._last.pop(trial.trial_id, {})
        if writer is None:
            return
        params = {
            name: value for name, value in trial.evaluated_params.items() if isinstance(value, bool | int | float | str)
        }
        if params and numbers:
            from tensorboardX.summary import hparams

            for summary in hparams(hparam_dict=params, metric_dict=numbers):
                writer.file_writer.add_summary(summary)
        writer.close()

    def on_experiment_end(self, trials: Any, **info: Any) -> None:
        """Closes what is open, such as the files of trials that are paused."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
