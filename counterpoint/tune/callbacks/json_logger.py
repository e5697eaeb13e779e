"""Writes each trial's `params.json` and its results as JSON lines to `result.json`, as Ray Tune's logger of the same name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from counterpoint.transport.files.atomic import write_atomically
from counterpoint.tune.callbacks.logger_callback import LoggerCallback
from counterpoint.tune.callbacks.numbered_lines import NumberedLines
from counterpoint.tune.result import Result
from counterpoint.tune.trial import Trial

PARAMS_FILE = "params.json"
RESULT_FILE = "result.json"


class JsonLoggerCallback(LoggerCallback):
    """`params.json` holds the configuration with which the trial goes on. NaN and infinities become null."""

    def __init__(self) -> None:
        self._files: dict[str, NumberedLines] = {}
        self._params: dict[str, dict[str, Any]] = {}

    def log_trial_start(self, trial: Trial) -> None:
        """Makes the directory and writes the configuration, if it is another than before."""
        if trial.trial_id not in self._files:
            Path(trial.logdir).mkdir(parents=True, exist_ok=True)
            self._files[trial.trial_id] = NumberedLines(Path(trial.logdir, RESULT_FILE))
        if self._params.get(trial.trial_id) is not trial.config:
            config = orjson.dumps(trial.config, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
            write_atomically(Path(trial.logdir, PARAMS_FILE), config, durable=False)
            self._params[trial.trial_id] = trial.config

    def log_trial_restore(self, trial: Trial) -> None:
        """Writes the configuration, which may be another trial's."""
        self.log_trial_start(trial)

    def log_trial_result(self, iteration: int, trial: Trial, result: Result, number: int | None) -> None:
        """Appends the result."""
        self.log_trial_start(trial)
        self._files[trial.trial_id].append(orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE), number)

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Forgets the trial."""
        self._files.pop(trial.trial_id, None)
        self._params.pop(trial.trial_id, None)
