"""An experiment's trials as a table, live on a terminal; elsewhere a line for each change, and a summary now and then.

Names and errors may come from elsewhere, so their markup is not interpreted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from counterpoint.job.number_format import duration, number
from counterpoint.tune.callbacks.callback import Callback
from counterpoint.tune.errors import in_one_line
from counterpoint.tune.result import TIME_TOTAL_S, TRAINING_ITERATION, Result, lookup
from counterpoint.tune.trial import Trial

REFRESH_SECONDS = 0.5
SUMMARY_SECONDS = 15.0
"""Longest silence of the plain lines."""

MOST_ROWS = 40
"""Trials that the table shows: those that run, then the newest."""

STYLES = {"TERMINATED": "green", "RUNNING": "yellow", "ERROR": "red", "PAUSED": "cyan"}


@dataclass(frozen=True)
class TrialRow:
    """What is shown of a trial."""

    trial_id: str
    status: str
    params: dict[str, Any]
    """What differs between trials, by flat name."""
    result: Result
    """The last result of the trial."""
    failures: int = 0
    error: str | None = None
    copies: str = ""
    """The trial whose state it took over last."""


def row_of(trial: Trial, copies: str = "") -> TrialRow:
    """Returns a trial's row."""
    return TrialRow(
        trial.trial_id,
        trial.status,
        {name: lookup(trial.config, name) for name in trial.evaluated_params},
        trial.last_result,
        trial.num_failures,
        trial.error_msg,
        copies,
    )


def table_of(rows: Sequence[TrialRow], title: str, metric: str, mode: str, note: str = "") -> Group:
    """Returns the table, with the best trial and the errors below it."""
    shown = _shown(rows)
    names = sorted({name for row in shown for name in row.params})
    table = Table(box=box.SIMPLE_HEAD, title=f"{title}: {counts_of(rows)}{note}", title_justify="left")
    table.add_column("trial", no_wrap=True)
    table.add_column("state")
    for name in [*map(_short, names), "iteration", "time", metric]:
        table.add_column(name, justify="right")
    table.add_column("copied")
    table.add_column("failures", justify="right")
    for row in shown:
        table.add_row(
            row.trial_id,
            Text(row.status, STYLES.get(row.status, "dim")),
            *(_value(row.params.get(name)) for name in names),
            str(row.result.get(TRAINING_ITERATION, "-")),
            duration(seconds) if (seconds := _number(row.result, TIME_TOTAL_S)) is not None else "-",
            number(_number(row.result, metric)),
            row.copies or "-",
            str(row.failures or "-"),
        )
    left_out = len(rows) - len(shown)
    below = [Text(f"... and {left_out} more", "dim")] if left_out else []
    if (best := best_of(rows, metric, mode)) is not None:
        below.append(Text(f"best: {describe(best, metric)}", "bold"))
    errors = [Text(f"{row.trial_id}: {in_one_line(row.error)}", "red") for row in shown if row.error]
    return Group(table, *below, *errors)


def best_of(rows: Sequence[TrialRow], metric: str, mode: str) -> TrialRow | None:
    """Returns the row with the best last result; None before the first."""
    known = [row for row in rows if _number(row.result, metric) is not None]
    sign = 1 if mode == "max" else -1
    return max(known, key=lambda row: sign * float(_number(row.result, metric) or 0.0), default=None)


def describe(row: TrialRow, metric: str) -> str:
    """Describes a trial in one line: its id, its metric, its values."""
    values = ", ".join(f"{name.replace('/', '.')} = {_value(value)}" for name, value in row.params.items())
    iteration = row.result.get(TRAINING_ITERATION, 0)
    return f"{row.trial_id}: {metric} {number(_number(row.result, metric))} after {iteration}; {values}"


def counts_of(rows: Sequence[TrialRow]) -> str:
    """Describes how many trials have which state."""
    counts = Counter(row.status for row in rows)
    states = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing has begun"
    return f"{len(rows)} trials, {states}"


@dataclass
class LiveTable(Callback):
    """Shows an experiment while it runs."""

    console: Console
    title: str
    metric: str
    mode: str
    note: Callable[[], str] = lambda: ""
    """A line of the executor's: its resources."""
    _live: Live | None = None
    _shown_at: float = 0.0
    _has_begun: bool = False
    """Whether what is heard happens now. Before the first step, a resume repeats what happened to the trials."""
    _copies: dict[str, str] = field(default_factory=dict)
    """The trial whose state each trial took over last."""

    def setup(self, *arguments: Any, **info: Any) -> None:
        """Begins to show the table."""
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        self._shown_at = time.monotonic()

    def on_step_begin(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """Prints what happens from now on."""
        self._has_begun = True

    def on_step_end(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """Refreshes the table, or prints a summary after a long silence."""
        now = time.monotonic()
        if now - self._shown_at < (REFRESH_SECONDS if self._live is not None else SUMMARY_SECONDS):
            return
        self._shown_at = now
        if self._live is not None:
            self._live.update(
                table_of(self._rows(trials), self.title, self.metric, self.mode, self._note()), refresh=True
            )
        else:
            self._summarize(trials)

    def on_trial_start(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """Prints it, where there is no table."""
        self._say(trial, f"runs: {self._values(trial)}")

    def on_trial_restore(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """Prints whose state a trial has taken over."""
        checkpoint = trial.checkpoint
        if checkpoint is not None and checkpoint.trial_id not in ("", trial.trial_id):
            self._copies[trial.trial_id] = checkpoint.trial_id
            self._say(trial, f"goes on from {checkpoint.trial_id} after {checkpoint.iteration}: {self._values(trial)}")

    def on_trial_complete(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """Prints the trial that has ended."""
        self._say(trial, f"is done: {describe(row_of(trial), self.metric)}")

    def on_trial_recover(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """Prints why a trial is started again."""
        self._say(trial, f"failed, and is started again: {in_one_line(trial.error_msg)}")

    def on_trial_fail(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """Prints why a trial has failed for good."""
        self._say(trial, f"failed: {in_one_line(trial.error_msg)}; see {trial.error_file}")

    def on_experiment_end(self, trials: Sequence[Trial], **info: Any) -> None:
        """Prints the whole table once more."""
        self.close()
        self.console.print(table_of(self._rows(trials), self.title, self.metric, self.mode), soft_wrap=True)

    def close(self) -> None:
        """Restores the terminal. Safe to call twice."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _rows(self, trials: Sequence[Trial]) -> list[TrialRow]:
        return [row_of(trial, self._copies.get(trial.trial_id, "")) for trial in trials]

    def _note(self) -> str:
        return f"; {note}" if (note := self.note()) else ""

    def _summarize(self, trials: Sequence[Trial]) -> None:
        rows = self._rows(trials)
        best = best_of(rows, self.metric, self.mode)
        what = f"; best {describe(best, self.metric)}" if best is not None else ""
        self.console.print(f"... {counts_of(rows)}{self._note()}{what}", soft_wrap=True, highlight=False)

    def _say(self, trial: Trial, text: str) -> None:
        if not self._has_begun:
            return
        self._shown_at = self._shown_at if self._live is not None else time.monotonic()
        if self._live is None:
            self.console.print(f"{time.strftime('%H:%M:%S')} {trial.trial_id} {text}", soft_wrap=True, highlight=False)

    @staticmethod
    def _values(trial: Trial) -> str:
        return ", ".join(f"{name.replace('/', '.')} = {_value(value)}" for name, value in row_of(trial).params.items())


def _shown(rows: Sequence[TrialRow]) -> list[TrialRow]:
    if len(rows) <= MOST_ROWS:
        return list(rows)
    running = [row for row in rows if row.status == Trial.RUNNING][:MOST_ROWS]
    others = [row for row in rows if row.status != Trial.RUNNING]
    newest = others[len(others) - (MOST_ROWS - len(running)) :] if len(running) < MOST_ROWS else []
    return [*running, *newest]


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _number(result: Result, metric: str) -> float | None:
    value = lookup(result, metric)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
