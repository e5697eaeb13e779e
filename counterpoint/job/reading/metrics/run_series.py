"""The curves of a job's runs, from the metrics files of their orchestrators and of the trainer.

A run's steps are read when it is first looked at, and then only what is new. `JobSeries` keeps the columns (`step_table.py`) of
the runs that were looked at last, in bounded memory; another is read again, which takes a tenth of a second for 10,000 steps.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from counterpoint.job.reading.metrics.downsample import Curve, Floats, downsample
from counterpoint.job.reading.metrics.evaluations import result_in
from counterpoint.job.reading.metrics.history import RATE_STEPS
from counterpoint.job.reading.metrics.metrics_lines import Line, step_of
from counterpoint.job.reading.metrics.sampled_lines import of_last_attempt, sampled_steps
from counterpoint.job.reading.metrics.step_table import Integers, StepTable
from counterpoint.job.reading.metrics.trained_lines import TrainedLines
from counterpoint.orchestrator.evaluation.lines import EVALUATIONS_FILE
from counterpoint.orchestrator.step.step_metrics import RESTORED_TOKENS
from counterpoint.transport.files.appended_lines import LONGEST_LINE, AppendedLines
from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular

NEWEST_BYTES, NEWEST_TRAINED = 2**25, 20_000
"""What is read in full of a file that is met anew: of an orchestrator's the bytes at its end, some 20,000 steps; of the
trainer's the lines."""

OLDER_STEPS = 2_000
"""Steps that are read of what is before it, evenly spread."""

KEPT_BYTES = 2**25
"""Bytes of columns that are kept of one job's runs, besides those of the runs that are asked for."""

READING_SECONDS = 5.0
"""Longest time for which one answer reads on in the trainer's file; the next answer continues."""

MOST_NAMES = 64
"""Metrics of one run that are kept at once."""

MOST_EVALUATIONS = 64
"""Evaluations of one run whose results are kept."""

EVALUATION = "evaluation/"
SECONDS_A_STEP = "seconds_a_step"
TOKENS_PER_SECOND = "completion_tokens_per_second"

DERIVED = {
    SECONDS_A_STEP: ("uptime_seconds",),
    TOKENS_PER_SECOND: ("uptime_seconds", "tokens/completion", RESTORED_TOKENS),
}
"""Metrics that no file has, and what they are computed from."""

Axis = Literal["step", "time"]


@dataclass(frozen=True, slots=True)
class Window:
    """The part of curves that is drawn."""

    axis: Axis = "step"
    begin: float | None = None
    """The least step or time; None: the first."""
    end: float | None = None
    points: int = 500
    """Most points of a curve."""


class RunSeries:
    """The columns of one run."""

    def __init__(self, directory: Path, run_id: str, names: Collection[str]) -> None:
        needed = {part for name in names for part in DERIVED.get(name, (name,))}
        self.shipped = StepTable(run_id, needed)
        self.trained = StepTable(run_id, needed)
        self._evaluated: dict[str, StepTable] = {}
        """The results of each evaluation, at the step that was evaluated."""
        self._path = directory / f"run_{run_id}" / "metrics.jsonl"
        self._lines = AppendedLines(self._path, NEWEST_BYTES)
        self._results = AppendedLines(self._path.with_name(EVALUATIONS_FILE), NEWEST_BYTES)
        self._generation = -1
        self._seen = 0
        self._is_new = False

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(table.nbytes for table in (self.shipped, self.trained, *self._evaluated.values()))

    @property
    def unread(self) -> str:
        """Says which part of the run's own file the last `refresh` did not read; empty if it read everything."""
        if self._lines.more:
            return self._lines.how_far
        newest = NEWEST_BYTES // 2**20
        return (
            f"{self._path} is long: some of the steps before its newest {newest} MiB are shown"
            if self._lines.left_out
            else ""
        )

    def covers(self, names: Iterable[str]) -> bool:
        """Whether it has the columns for these metrics."""
        return all(part in self.shipped.names for name in names for part in DERIVED.get(name, (name,)))

    def refresh(self, trained: TrainedLines) -> None:
        """Reads what is new. Raises as `AppendedLines`."""
        for offset, block in self._lines.new_blocks(self._restart):
            if self._is_new:
                self._is_new = False
                self._add_older()
            for raw in block.split(b"\n"):
                self.shipped.add(raw, offset)
                offset += len(raw) + 1
        for _, block in self._results.new_blocks(self._evaluated.clear):
            for raw in block.splitlines():
                self._add_result(raw)
        if trained.generation != self._generation:
            self.trained.clear()
            self._generation, self._seen = trained.generation, 0
        run_id, begin, count = self.trained.run_id, self._seen, trained.count_of(self.trained.run_id)
        self._seen = max(begin, count - NEWEST_TRAINED)
        for offset, raw in trained.lines_of(run_id, begin, self._seen, -(-(self._seen - begin) // OLDER_STEPS) or 1):
            self.trained.add(raw, offset)
        for offset, raw in trained.lines_of(run_id, self._seen):
            self.trained.add(raw, offset)
            self._seen += 1

    def curve(self, name: str, window: Window) -> Curve:
        """Returns a metric, or one of `DERIVED`. Empty where the run does not have it."""
        table = self.shipped
        if name in DERIVED:
            values = self._derived(name)
        else:
            tables = [self.shipped, self.trained]
            if name.startswith(EVALUATION):  # `metrics.jsonl` has them, too, but in the line of a later step
                tables = [*self._evaluated.values(), *tables]
            table = next((table for table in tables if table.has(name)), self.shipped)
            values = table.values(name)
        x = table.steps().astype(np.float64) if window.axis == "step" else table.times()
        order = np.argsort(x, kind="stable")  # times may go back when a clock is set
        order = order[np.isfinite(values[order])]
        x, values = x[order], values[order]
        begin = 0 if window.begin is None else int(np.searchsorted(x, window.begin, "left"))
        end = len(x) if window.end is None else int(np.searchsorted(x, window.end, "right"))
        return downsample(x[begin:end], values[begin:end], window.points)

    def names(self) -> list[str]:
        """Returns the names of all curves that the run has, sorted."""
        derived = {*DERIVED} if len(self.shipped) else set()
        seen = derived.union(*(table.seen for table in (self.shipped, self.trained, *self._evaluated.values())))
        return sorted(seen - {"step", "time"})

    def highest(self, name: str, window: Window, count: int) -> tuple[Integers, Floats, Floats]:
        """Returns the steps, within the window, in which the orchestrator's metric is greatest: step, place and value."""
        steps, values = self.shipped.steps(), self.shipped.values(name)
        x = steps.astype(np.float64) if window.axis == "step" else self.shipped.times()
        rows = np.flatnonzero(
            np.isfinite(values)
            & (x >= (-np.inf if window.begin is None else window.begin))
            & (x <= (np.inf if window.end is None else window.end))
        )
        rows = rows[np.argsort(-values[rows], kind="stable")[:count]]
        return steps[rows], x[rows], values[rows]

    def place_of(self, step: int, axis: Axis) -> float | None:
        """Returns where on the axis a step is; None for the time of one that was not shipped yet."""
        if axis == "step":
            return float(step)
        steps = self.shipped.steps()
        row = int(np.searchsorted(steps, step))
        return float(self.shipped.times()[row]) if row < len(steps) and steps[row] == step else None

    def line_of_step(self, step: int) -> Line:
        """Returns the orchestrator's whole line of a step; empty if it is not there. Raises `OSError`, `UntrustedFileError`."""
        return line_at(self._path, self.shipped, step)

    def _derived(self, name: str) -> Floats:
        """A step begins with the end of the one before, or with its process; a rate is that of `History.tokens_per_second`."""
        times, uptime = self.shipped.times(), self.shipped.values("uptime_seconds")
        took, since = (np.append(np.nan, np.diff(each))[: len(times)] for each in (times, uptime))
        took = np.where(took < 0, np.where(since > 0, since, uptime), took)  # the machine's clock was set back
        seconds: Floats = np.fmin(took, uptime)
        seconds[np.flatnonzero(np.diff(self.shipped.steps()) > 1) + 1] = np.nan  # the step before is not kept
        seconds[~(seconds > 0)] = np.nan
        if name == SECONDS_A_STEP:
            return seconds
        known = np.isfinite(seconds)
        completion, restored = (
            np.nan_to_num(self.shipped.values(name)) for name in ("tokens/completion", RESTORED_TOKENS)
        )
        tokens, took = (
            _newest_sums(np.where(known, np.nan_to_num(each), 0.0), RATE_STEPS)
            for each in (completion - restored, seconds)
        )
        rate: Floats = np.divide(tokens, took, out=np.full(len(took), np.nan), where=took > 0)
        return rate

    def _restart(self) -> None:
        self.shipped.clear()
        self._is_new = True

    def _add_older(self) -> None:
        """Adds some of the steps before those that are read in full."""
        if end := self._lines.left_out:
            with open_regular(self._path) as file:
                places = range(0, end, -(-end // OLDER_STEPS))
                for offset, line in of_last_attempt(sampled_steps(file.fileno(), places, end)):
                    self.shipped.add_line(line, offset)

    def _add_result(self, raw: bytes) -> None:
        """Adds the metrics of one result of an evaluation."""
        result = result_in(raw)
        if result is None or (len(self._evaluated) >= MOST_EVALUATIONS and result.name not in self._evaluated):
            return
        table = self._evaluated.setdefault(result.name, StepTable(self.shipped.run_id, self.shipped.names))
        table.add_line({"step": result.step, "time": result.time, **result.values}, 0)


def _newest_sums(values: Floats, count: int) -> Floats:
    """Returns for each value the sum of the newest `count` up to it."""
    sums = np.cumsum(values)
    sums[count:] -= sums[:-count].copy()
    return sums


class JobSeries:
    """The curves of one job's runs. One caller at a time (`Jobs.reading`)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runs: OrderedDict[str, RunSeries] = OrderedDict()
        self._trained = TrainedLines(directory)
        self.unreadable = ""
        """Why a file could not be read, or not to its end, when it was last tried; empty if all could."""

    def run(self, run_id: str, names: Collection[str], deadline: float | None = None) -> RunSeries:
        """Returns the run's columns of at least these metrics, as its files are now.

        `deadline`, by the monotonic clock, ends the reading of the trainer's file, and a later call reads on; None: in
        `READING_SECONDS`. Give all runs of one answer the same.
        """
        series = self._runs.get(run_id)
        if series is None or not series.covers(names):
            kept = series.shipped.names if series is not None else frozenset()
            wanted = kept | set(names) if len(kept) + len(names) <= MOST_NAMES else set(names)
            series = self._runs[run_id] = RunSeries(self._directory, run_id, wanted)
        self._runs.move_to_end(run_id)
        self.unreadable = ""
        try:
            self._trained.refresh(time.monotonic() + READING_SECONDS if deadline is None else deadline)
            series.refresh(self._trained)
            self.unreadable = series.unread or self._trained.unread
        except (OSError, UntrustedFileError) as error:
            self.unreadable = str(error)
        while len(self._runs) > 1 and self.nbytes > KEPT_BYTES:
            self._runs.popitem(last=False)
        return series

    @property
    def nbytes(self) -> int:
        """Bytes of the columns that are kept."""
        return sum(series.nbytes for series in self._runs.values())


def line_at(path: Path, table: StepTable, step: int) -> Line:
    """Returns the whole line of one step of a table from its file; empty if it is not there any more."""
    steps = table.steps()
    row = int(np.searchsorted(steps, step))
    if row == len(steps) or steps[row] != step:
        return {}
    with open_regular(path) as file:
        line = step_of(os.pread(file.fileno(), LONGEST_LINE, int(table.offsets()[row])).partition(b"\n")[0])
    return line if line.get("step") == step and line.get("run_id", table.run_id) == table.run_id else {}
