"""Results of a job, or of all jobs of a sweep, as pandas frames, read from its directory while it runs or afterwards.

    results = counterpoint.read("outputs/demo")
    results.steps().plot(x="step", y="reward/mean")
    results.plot("reward/mean")

What a guest, a model or an environment wrote is checked as everywhere: a line that is not a step's is left out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from counterpoint.job.directory import JOB_FILE, is_running, run_ids_in
from counterpoint.job.reading.metrics.evaluations import result_in
from counterpoint.job.reading.metrics.metrics_lines import Follower, Line, step_of
from counterpoint.job.reading.metrics.trained_lines import TrainedLines
from counterpoint.job.reading.rollouts.rollout_records import find_run, find_step, read_records
from counterpoint.job.results.step_calls import joined
from counterpoint.job.results.varied_keys import flat_config, varied_keys
from counterpoint.job.start import is_beginning
from counterpoint.orchestrator.evaluation.lines import EVALUATIONS_FILE
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.appended_lines import AppendedLines
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.files.untrusted import UntrustedFileError
from counterpoint.transport.process.extras import require

if TYPE_CHECKING:
    from pandas import DataFrame

CONFIG = "config/"
"""Precedes a key that differs from run to run and has the name of another column."""


class Results:
    """The results of a job, or of the jobs of a sweep. Each method reads the files anew.

    All frames have the column `run_id`, and one for each key of the configuration that differs from run to run, such as
    `training.learning_rate`. Those of a sweep's folder have `job`, too: the job's directory below it.
    """

    def __init__(self, directory: Path | str) -> None:
        """`directory`: a job's, or one with jobs in it. Raises `UserError` without a job and a run in it, and without pandas."""
        self.directory = Path(directory)
        if not self._jobs:
            raise UserError(
                f"{directory} holds neither a job ({JOB_FILE} is missing) nor a run (run_<id>/), nor directories of jobs"
            )
        require("counterpoint.read", "pandas")

    @property
    def runs(self) -> list[str]:
        """Returns the ids of its runs that have begun; of a sweep's folder, `JOB/ID`."""
        return [self._named(job, run_id) for job in self._jobs for run_id in _runs_in(job)]

    @property
    def config(self) -> DataFrame:
        """Returns a row for each run that has begun: all values of its configuration, by dotted path as in a sweep's file."""
        return _frame([self._head(job, run_id) | values for job, run_id, values in self._configs()], self._first)

    def plot(self, metric: str = "reward/mean", **options: Any) -> Any:
        """Draws a metric over the steps, a line for each run, named by what differs; returns matplotlib's axes.

        `options`: those of `pandas.DataFrame.plot`. Raises `UserError` for a metric that no step has, and without matplotlib.
        """
        require("plot", "matplotlib")
        steps = self.steps()
        if metric not in steps:
            near = ", ".join(get_close_matches(metric, [str(name) for name in steps]))
            raise UserError(f"no step in {self.directory} has the metric {metric!r}; nearest: {near or 'none'}")
        names = {}
        for (job, run_id), values in self._varied().items():
            said = ", ".join(f"{name} = {value}" for name, value in values.items())
            names[self._named(job, run_id)] = (
                f"{self._named(job, run_id)}: {said}" if said else self._named(job, run_id)
            )
        runs = steps.run_id if "job" not in steps else steps.job + "/" + steps.run_id
        lines = steps.assign(run=runs.map(names)).pivot(index="step", columns="run", values=metric)
        return lines.plot(**{"ylabel": metric, **options})

    def steps(self, run: str | None = None) -> DataFrame:
        """Returns a row for each step that was shipped or trained: its metrics (`docs/metrics.md`), by step.

        `run`: only this one. A step of one side alone has NaN for the other's. Raises `UserError` for a file that cannot be read.
        """
        trained = {job: TrainedLines(job) for job in self._jobs}
        try:
            for lines in trained.values():
                lines.refresh(math.inf)
            rows = [
                self._head(job, run_id) | row
                for job, run_id in self._chosen(run)
                for row in _steps_of(job, run_id, trained[job])
            ]
        except (OSError, UntrustedFileError) as error:
            raise UserError(f"{self.directory}: {error}") from None
        return self._with_varied(rows, ["step"])

    def rollouts(
        self, run: str | None = None, steps: SupportsIndex | Iterable[SupportsIndex] | None = None
    ) -> DataFrame:
        """Returns a row for each rollout of steps that are kept: its record (`docs/contracts.md`), and its `step`.

        `steps`: only these. `turns` stays a list of dicts. Raises `UserError` for a step that is not there or cannot be read.
        """
        asked = steps if steps is None or isinstance(steps, Iterable) else [steps]
        wanted = None if asked is None else [operator.index(step) for step in asked]  # a frame's numbers are numpy's
        rows: list[dict[str, Any]] = []
        for job, run_id in self._chosen(run):
            there = published_steps(job / f"run_{run_id}" / "rollouts")
            for step in there if wanted is None else [find_step(job, run_id, each) for each in wanted]:
                head = self._head(job, run_id) | {"step": step}
                rows += [head | record.fields for record in read_records(job, run_id, step)]
        return self._with_varied(rows, ["step"])

    def evaluations(self, run: str | None = None) -> DataFrame:
        """Returns a row for each metric of each result of an evaluation: `value`, and `low` and `high` of its 95 % interval.

        A result that could not be played is one row with its `error`. Raises `UserError` for a file that cannot be read.
        """
        try:
            rows = [
                self._head(job, run_id) | row
                for job, run_id in self._chosen(run)
                for _, block in AppendedLines(job / f"run_{run_id}" / EVALUATIONS_FILE).new_blocks(lambda: None)
                for text in block.splitlines()
                for row in _rows_of(text)
            ]
        except (OSError, UntrustedFileError) as error:
            raise UserError(f"{self.directory}: {error}") from None
        return self._with_varied(rows, ["evaluation", "step", "time", "metric", "value", "low", "high", "error"])

    @property
    def _jobs(self) -> list[Path]:
        """The directory itself if it is a job's, else those of jobs below it: a sweep has its own below its name."""
        if _is_job(self.directory):
            return [self.directory]
        return sorted(
            {path for depth in ("*", "*/*") for path in self.directory.glob(depth) if (path / JOB_FILE).is_file()}
        )

    @property
    def _first(self) -> list[str]:
        return ["run_id"] if self._jobs == [self.directory] else ["job", "run_id"]

    def _named(self, job: Path, run_id: str) -> str:
        return "/".join(self._head(job, run_id).values())

    def _head(self, job: Path, run_id: str) -> dict[str, Any]:
        """The values that say of which run a row is."""
        head = {"run_id": run_id}
        return head if job == self.directory else {"job": job.relative_to(self.directory).as_posix()} | head

    def _chosen(self, run: str | None) -> list[tuple[Path, str]]:
        """The runs, or the one called `run`, each with its job's directory."""
        there = [(job, run_id) for job in self._jobs for run_id in _runs_in(job)]
        if run is None:
            return there
        if found := [each for each in there if self._named(*each) == run]:
            return found
        if self._jobs == [self.directory]:
            return [(self.directory, find_run(self.directory, run))]
        raise UserError(f"{self.directory} has no run {run!r}; it has {', '.join(self.runs) or 'none'}")

    def _configs(self) -> list[tuple[Path, str, dict[str, Any]]]:
        return [(job, run_id, flat_config(job, run_id)) for job, run_id in self._chosen(None)]

    def _varied(self) -> dict[tuple[Path, str], dict[str, Any]]:
        """The values of the keys that differ, by run."""
        configs = self._configs()
        keys = varied_keys([values for _, _, values in configs], self._jobs)
        return {(job, run_id): {key: values.get(key) for key in keys} for job, run_id, values in configs}

    def _with_varied(self, rows: list[dict[str, Any]], columns: list[str]) -> DataFrame:
        """A frame of the rows, in which each has the values of its run that differ from other runs'."""
        taken = {*columns, *self._first, *(name for row in rows for name in row)}
        varied = {
            self._named(*run): {(CONFIG + key if key in taken else key): value for key, value in values.items()}
            for run, values in self._varied().items()
        }
        keys = [*dict.fromkeys(key for values in varied.values() for key in values)]
        rows = [row | varied.get("/".join(row[name] for name in self._first), {}) for row in rows]
        return _frame(rows, [*self._first, *keys, *columns])


def _is_job(directory: Path) -> bool:
    is_there = (directory / JOB_FILE).exists() or is_running(directory) or is_beginning(directory)
    return is_there or bool(run_ids_in(directory))


def _runs_in(job: Path) -> list[str]:
    return [] if is_beginning(job) else run_ids_in(job)


def _steps_of(job: Path, run_id: str, trained: TrainedLines) -> Iterator[Line]:
    shipped: dict[int, Line] = {}
    follower = Follower(job / f"run_{run_id}" / "metrics.jsonl")
    for line in follower.new_lines(shipped.clear):
        shipped[line["step"]] = line
    learned = {line["step"]: line for _, text in trained.lines_of(run_id, 0) if (line := step_of(text))}
    for step in sorted({*shipped, *learned}):
        yield joined(step, shipped.get(step, {}), learned.get(step, {}))


def read(directory: Path | str) -> Results:
    """Returns the results of the job in `directory`, or of all jobs below it, for frames; empty until runs have begun.

    Raises `UserError` if there is neither a job nor a run, and without pandas.
    """
    return Results(directory)


def _rows_of(text: bytes) -> Iterator[dict[str, Any]]:
    """Yields a row for each metric of a line of `evaluations.jsonl`, and for an error; none for what is no result."""
    if (result := result_in(text)) is None:
        return
    own = {"evaluation": result.name, "step": result.step, "time": result.time}
    if result.error:
        yield own | {"error": result.error}
    for name, each in result.every.items():
        yield own | {"metric": name} | asdict(each)


def _frame(rows: list[dict[str, Any]], columns: list[str]) -> DataFrame:
    """Returns a frame of these rows, with the columns first."""
    others = dict.fromkeys(name for row in rows for name in row if name not in columns)
    from pandas import DataFrame

    return DataFrame.from_records(rows, columns=[*columns, *others])
