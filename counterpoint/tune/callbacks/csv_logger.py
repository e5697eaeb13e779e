"""Writes each trial's results to `progress.csv`, nested values under flat names, as Ray Tune's logger of the same name.

The columns are those of the trial's first result; what later results have besides is in `result.json` only. A row is one line:
a line break within a text is written as a backslash and an n.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from counterpoint.tune.callbacks.logger_callback import LoggerCallback
from counterpoint.tune.callbacks.numbered_lines import NumberedLines
from counterpoint.tune.result import Result, flattened
from counterpoint.tune.trial import Trial

logger = logging.getLogger(__name__)

PROGRESS_FILE = "progress.csv"


class CSVLoggerCallback(LoggerCallback):
    """Writes `progress.csv`. The configuration is not in it (see `params.json`)."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[NumberedLines, list[str]]] = {}

    def log_trial_result(self, iteration: int, trial: Trial, result: Result, number: int | None) -> None:
        """Appends a row, after a header if it is the first."""
        flat = flattened({key: value for key, value in result.items() if key != "config"})
        if trial.trial_id not in self._files:
            self._files[trial.trial_id] = self._opened(trial, list(flat))
        file, columns = self._files[trial.trial_id]
        if more := flat.keys() - set(columns):
            logger.debug("%s: no column for %s; they are in result.json", file.path, ", ".join(sorted(more)))
        file.append(_row(flat.get(column) for column in columns), number)

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Forgets the trial."""
        self._files.pop(trial.trial_id, None)

    def _opened(self, trial: Trial, columns: list[str]) -> tuple[NumberedLines, list[str]]:
        path = Path(trial.logdir, PROGRESS_FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = NumberedLines(path, header_lines=1)
        if path.exists() and path.stat().st_size:
            with path.open(newline="") as text:
                return file, next(csv.reader(text))
        file.write(_row(columns))
        return file, columns


def _row(values: Iterable[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([_one_line(value) for value in values])
    return text.getvalue().encode()


def _one_line(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\r", "\\r").replace("\n", "\\n")
    return value
