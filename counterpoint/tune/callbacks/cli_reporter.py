"""A table of the trials on standard output now and then: Ray Tune 1.x's progress reporter of this name."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from counterpoint.tune.callbacks.callback import Callback
from counterpoint.tune.result import TIME_TOTAL_S, TRAINING_ITERATION, flattened, lookup
from counterpoint.tune.trial import Trial

Columns = Mapping[str, str] | Sequence[str] | None
"""Names of metrics or parameters, or what is shown by name."""


class CLIReporter(Callback):
    """Prints a row for each trial, those that run first, at most every `max_report_frequency` seconds and at the end."""

    def __init__(
        self,
        metric_columns: Columns = None,
        parameter_columns: Columns = None,
        max_progress_rows: int = 20,
        max_report_frequency: float = 5.0,
    ) -> None:
        self._metrics = _named(metric_columns or {TRAINING_ITERATION: "iter", TIME_TOTAL_S: "total time (s)"})
        self._parameters = _named(parameter_columns)
        self._rows, self._seconds = max_progress_rows, max_report_frequency
        self._due = 0.0

    def add_metric_column(self, metric: str, representation: str | None = None) -> None:
        """Shows another metric."""
        self._metrics[metric] = representation or metric

    def add_parameter_column(self, parameter: str, representation: str | None = None) -> None:
        """Shows another parameter; without any, all that were drawn are shown."""
        self._parameters[parameter] = representation or parameter

    def on_step_end(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """Prints the table, if it is time."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._seconds
            print(self.table(trials), flush=True)  # noqa: T201

    def on_experiment_end(self, trials: Sequence[Trial], **info: Any) -> None:
        """Prints the last table."""
        print(self.table(trials), flush=True)  # noqa: T201

    def table(self, trials: Sequence[Trial]) -> str:
        """Returns the lines of the table."""
        parameters = self._parameters or _named([name for trial in trials for name in trial.evaluated_params])
        rows = [["Trial name", "status", *parameters.values(), *self._metrics.values()]]
        for trial in sorted(trials, key=lambda each: each.status != Trial.RUNNING)[: self._rows]:
            values = flattened(trial.config) | trial.config
            cells = [values.get(name, trial.evaluated_params.get(name)) for name in parameters]
            cells += [lookup(trial.last_result, name) for name in self._metrics]
            rows.append([str(trial), trial.status, *map(_shown, cells)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        more = [f"... {len(trials) - self._rows} more trials not shown"] if len(trials) > self._rows else []
        return "\n".join([*lines, *more])


def _named(columns: Columns) -> dict[str, str]:
    return dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns or ()}


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
