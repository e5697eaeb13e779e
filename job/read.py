"""A job's results as pandas frames, read from its directory while it runs or afterwards.

    results = counterpoint.read("outputs/demo")
    results.steps().plot(x="step", y="reward/mean")

What a guest, a model or an environment wrote is checked as everywhere: a line that is not a step's is left out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from counterpoint.job.directory import JOB_FILE, is_running, run_ids_in
from counterpoint.job.inspection.metrics_lines import Follower, Line, is_number, step_of
from counterpoint.job.inspection.rollout_records import find_run, find_step, read_records
from counterpoint.job.inspection.trained_lines import TrainedLines
from counterpoint.job.start import is_beginning
from counterpoint.orchestrator.evaluation.lines import EVALUATIONS_FILE
from counterpoint.run.loop_health.slow_spots import METRIC
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.appended_lines import AppendedLines
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.files.untrusted import UntrustedFileError, parse_json
from counterpoint.transport.process.extras import require

if TYPE_CHECKING:
    from pandas import DataFrame

TRAINER = "trainer/"
"""Precedes a trainer's metric that has the name of an orchestrator's."""

_NO_COLUMNS = {"run_id", "step", METRIC, TRAINER + "run_id", TRAINER + "step", TRAINER + METRIC}
"""What lines have that is no metric with a column of its own."""


class Results:
    """The results of one job. Each method reads the files anew; all frames have the column `run_id`."""

    def __init__(self, directory: Path | str) -> None:
        """`directory`: the job's. Raises `UserError` if it holds neither a job nor a run, and without pandas."""
        self.directory = Path(directory)
        is_job = (self.directory / JOB_FILE).exists() or is_running(self.directory) or is_beginning(self.directory)
        if not is_job and not self.runs:
            raise UserError(f"{directory} holds neither a job ({JOB_FILE} is missing) nor a run (run_<id>/)")
        require("counterpoint.read", "pandas")

    @property
    def runs(self) -> list[str]:
        """Returns the ids of its runs that have begun."""
        return [] if is_beginning(self.directory) else run_ids_in(self.directory)

    def steps(self, run: str | None = None) -> DataFrame:
        """Returns a row for each step that was shipped or trained: its metrics (`docs/metrics.md`), by step.

        `run`: only this one. A step of one side alone has NaN for the other's. Raises `UserError` for a file that cannot be read.
        """
        trained = TrainedLines(self.directory)
        try:
            trained.refresh(math.inf)
            rows = [row for run_id in self._chosen(run) for row in self._steps_of(run_id, trained)]
        except (OSError, UntrustedFileError) as error:
            raise UserError(f"{self.directory}: {error}") from None
        return _frame(rows, ["run_id", "step"])

    def rollouts(
        self, run: str | None = None, steps: SupportsIndex | Iterable[SupportsIndex] | None = None
    ) -> DataFrame:
        """Returns a row for each rollout of steps that are kept: its record (`docs/contracts.md`), and its `step`.

        `steps`: only these. `turns` stays a list of dicts. Raises `UserError` for a step that is not there or cannot be read.
        """
        asked = steps if steps is None or isinstance(steps, Iterable) else [steps]
        wanted = None if asked is None else [operator.index(step) for step in asked]  # a frame's numbers are numpy's
        rows: list[dict[str, Any]] = []
        for run_id in self._chosen(run):
            there = published_steps(self.directory / f"run_{run_id}" / "rollouts")
            for step in there if wanted is None else [find_step(self.directory, run_id, each) for each in wanted]:
                records = read_records(self.directory, run_id, step)
                rows += [{"run_id": run_id, "step": step, **record.fields} for record in records]
        return _frame(rows, ["run_id", "step"])

    def evaluations(self, run: str | None = None) -> DataFrame:
        """Returns a row for each metric of each result of an evaluation: `value`, and `low` and `high` of its 95 % interval.

        A result that could not be played is one row with its `error`. Raises `UserError` for a file that cannot be read.
        """
        try:
            rows = [
                {"run_id": run_id, **row}
                for run_id in self._chosen(run)
                for _, block in AppendedLines(self.directory / f"run_{run_id}" / EVALUATIONS_FILE).new_blocks(
                    lambda: None
                )
                for text in block.splitlines()
                for row in metrics_of(text)
            ]
        except (OSError, UntrustedFileError) as error:
            raise UserError(f"{self.directory}: {error}") from None
        return _frame(rows, ["run_id", "evaluation", "step", "time", "metric", "value", "low", "high", "error"])

    def _chosen(self, run: str | None) -> list[str]:
        return self.runs if run is None else [find_run(self.directory, run)]

    def _steps_of(self, run_id: str, trained: TrainedLines) -> Iterator[Line]:
        shipped: dict[int, Line] = {}
        follower = Follower(self.directory / f"run_{run_id}" / "metrics.jsonl")
        for line in follower.new_lines(shipped.clear):
            shipped[line["step"]] = line
        learned = {line["step"]: line for _, text in trained.lines_of(run_id, 0) if (line := step_of(text))}
        for step in sorted({*shipped, *learned}):
            row, others = shipped.get(step, {}), learned.get(step, {})
            joined = row | {(TRAINER + name if name in row else name): value for name, value in others.items()}
            yield {"run_id": run_id, "step": step} | {name: joined[name] for name in joined if name not in _NO_COLUMNS}


def read(directory: Path | str) -> Results:
    """Returns the results of the job in `directory`, for frames, which are empty until its runs have begun.

    Raises `UserError` if the directory holds neither a job nor a run, and without pandas.
    """
    return Results(directory)


def metrics_of(text: bytes) -> Iterator[dict[str, Any]]:
    """Yields a row for each metric of a line of `evaluations.jsonl`, and for an error; none for what is no result."""
    try:
        line = parse_json(text)
    except UntrustedFileError:
        return
    own = {"evaluation": line.get("evaluation"), "step": line.get("step"), "time": line.get("time")}
    if isinstance(error := line.get("error"), str):
        yield own | {"error": error}
    metrics = line.get("metrics")
    for name, fields in metrics.items() if isinstance(metrics, dict) else ():
        if isinstance(fields, dict) and is_number(fields.get("value")):
            yield own | {"metric": name} | {bound: fields.get(bound) for bound in ("value", "low", "high")}


def _frame(rows: list[dict[str, Any]], columns: list[str]) -> DataFrame:
    """Returns a frame of these rows, with the columns first."""
    others = dict.fromkeys(name for row in rows for name in row if name not in columns)
    from pandas import DataFrame

    return DataFrame.from_records(rows, columns=[*columns, *others])
