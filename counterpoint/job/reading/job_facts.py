"""What is known of a job at one moment, for the overview and for its problems.

`JobReader` reads a job's directory again and again. It reads the ends of files, so that a first look at 1,000 runs of 10,000
steps takes some two seconds, and then only those that have changed. States, rates and reasons are computed by the functions
that `counterpoint status` uses (`counterpoint/job/reading/status.py`, `counterpoint/job/reading/run_state.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from counterpoint.cluster.job_files import holds_job
from counterpoint.job.directory import (
    JOB_FILE,
    MAX_JOB_BYTES,
    is_running,
    lock_file_of,
    orchestrator_of,
    own_runs,
    run_ids_in,
)
from counterpoint.job.processes_file import read_leniently
from counterpoint.job.reading.activity.fleet import (
    View,
    ViewedServer,
    join,
    join_outages,
    read_views,
    steps_in_trainer,
    trained_without_lines,
)
from counterpoint.job.reading.fine_tuning import FINE_TUNING, fine_tuning_of
from counterpoint.job.reading.metrics.balance import Idle, advice, idle_of
from counterpoint.job.reading.metrics.evaluations import EvaluationResults
from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.metrics.metrics_lines import Line
from counterpoint.job.reading.metrics.newest_steps import NewestSteps, NewestTrained, TrainedEnd, nulls_of
from counterpoint.job.reading.run_file import RunFile, RunFiles
from counterpoint.job.reading.run_state import FINE_TUNING_FILE, current_state, exclusion_of, is_driven, is_to_start
from counterpoint.job.reading.status import JobSnapshot
from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json
from counterpoint.transport.outages import OpenOutage

MOST_RUNS = 5_000
"""Runs of a job that are shown; the others, by id, are not."""


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run."""

    run_id: str
    history: History
    """Its newest steps alone, and what it has discarded since."""
    file: RunFile = field(default_factory=RunFile)
    rewards: tuple[float, ...] = ()
    """The mean rewards of some steps, evenly spread over the whole run."""
    is_guest: bool = False
    is_fine_tuning: bool = False
    """Whether it has no orchestrator, and no rollouts: it trains on data, or is driven by others."""
    state: str = ""
    alive: bool = False
    """Whether its orchestrator lives; without one, its job."""
    paused: bool = False
    exclusion: str | None = None
    """Why the trainer may not train it."""
    excluded_at: float | None = None
    begun_at: float = 0.0
    """Unix seconds before which the present orchestrator, or a change of what it may do, cannot have made a step."""
    mismatch: tuple[tuple[int, float], ...] = ()
    """The newest steps and their mismatch KL."""
    trained_times: tuple[float, ...] = ()
    """When the newest steps were trained, in Unix seconds."""
    empty: tuple[str, ...] = ()
    """Metrics of its newest step that are not finite."""
    idle: Idle = field(default_factory=lambda: Idle(None, None))
    """How long trainer and servers wait, over the newest steps."""

    @cached_property
    def lines(self) -> list[Line]:
        """The orchestrator's lines of the newest steps, ascending."""
        return [line for _, line in sorted(self.history.shipped.items())]

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the metrics in `lines`, and in the report on what was discarded since."""
        return frozenset(self.history.discarded).union(*self.lines)

    @property
    def newest(self) -> Line:
        """The line of its newest step: shipped, or, where nothing is shipped, trained."""
        return self.history.last_trained if self.is_fine_tuning else self.history.last_shipped

    @cached_property
    def step_seconds(self) -> list[float]:
        """How long each of the newest steps took."""
        if self.is_fine_tuning:
            return [after - before for before, after in pairwise(self.trained_times) if after > before]
        steps = sorted(self.history.shipped)[1:]  # of the first, the step before is not known
        return [seconds for step in steps if (seconds := self.history.seconds_of(step)) is not None and seconds > 0]

    @cached_property
    def seconds_a_step(self) -> float | None:
        """The median of `step_seconds`."""
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def seconds_left(self) -> float | None:
        """How long the steps that are left will take; None if that is unknown, or nothing makes them."""
        if self.history.steps is None or self.seconds_a_step is None or not self.alive:
            return None
        return max(0, self.history.steps - int(self.newest.get("step", 0))) * self.seconds_a_step


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What is known of a job."""

    directory: Path
    now: float
    running: bool = False
    """Whether `counterpoint run` runs."""
    state: str = ""
    """The state that the supervisor wrote last; empty if it never did."""
    workers: list[dict[str, Any]] = field(default_factory=list)
    """The fields of `WorkerView`, and `alive`."""
    runs: list[RunFacts] = field(default_factory=list)
    servers: list[ViewedServer] = field(default_factory=list)
    """The inference servers, as the runs that live see them."""
    outages: list[tuple[OpenOutage, list[str]]] = field(default_factory=list)
    """What is out for runs that live, with their ids."""
    disk_bytes: int | None = None
    disk_free_bytes: int | None = None
    error: str = ""
    """Why the job cannot be read."""

    @property
    def balance(self) -> str:
        """Which side of a job of one run waits, and what would end it, in words; empty if neither does for long."""
        if len(self.runs) != 1 or not self.running:
            return ""
        (run,) = self.runs
        if run.is_guest:  # what the job was configured for is not its
            return ""
        ranks = sum(worker["name"].startswith("trainer") for worker in self.workers)
        return advice(run.idle, run.file.schedule, len(self.servers), max(1, ranks))


class JobReader:
    """Reads one job's directory. One caller at a time (`Jobs.reading`)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._steps: dict[str, NewestSteps] = {}
        self._evaluations: dict[str, EvaluationResults] = {}
        self._files = RunFiles()
        self._trained: TrainedEnd | None = None
        self._in_trainer: dict[str, int] = {}
        self._job_identity: tuple[int, int, int] | None = None
        self._own: dict[str, RunFile] | None = None
        self._is_local = True
        self._first_phase = ""
        """The state of all runs while the fine-tuning goes on with which the job begins; empty after it."""

    def read(self) -> JobFacts:
        """Returns what is known now. Never raises because of what is in the directory."""
        now = time.time()
        error = ""
        if self._directory.is_file():  # a sweep's file (`counterpoint/serve/readers/sweep.py`)
            return JobFacts(self._directory, now)
        if not self._directory.is_dir():
            return JobFacts(self._directory, now, error=f"{self._directory} is no directory; expected that of a job")
        try:
            self._read_job_file()
        except (OSError, UntrustedFileError, KeyError, TypeError, AttributeError, ValueError) as reason:
            error = f"{self._directory / JOB_FILE} cannot be used: {reason!r}"
        state, listed = read_leniently(self._directory)
        recorded = [worker for worker in listed if _is_worker(worker)]
        running = is_running(self._directory)
        starters = recorded if running else []
        views = {view.run: view for view in read_views(self._directory) if view.is_current(now)}
        try:
            first = fine_tuning_of(self._directory) if running else None
            self._first_phase = FINE_TUNING if first is not None and first.weights is None else ""
            runs = [] if holds_job(self._directory) else self._read_runs(starters, views)
        except (OSError, UserError) as reason:
            runs, error = [], str(reason)
        status = JobSnapshot(self._directory, None, {}, [], running, self._is_local)
        workers = [worker | {"alive": status.is_alive(worker)} for worker in recorded]
        total, free = _disk(self._directory)
        return JobFacts(
            directory=self._directory,
            now=now,
            running=running,
            state=state,
            workers=workers,
            runs=runs,
            servers=join(views.values()) if runs else [],
            outages=join_outages(views.values()) if runs else [],
            disk_bytes=total,
            disk_free_bytes=free,
            error=error,
        )

    def _read_job_file(self) -> None:
        """Reads `job.json` if it has changed."""
        path = self._directory / JOB_FILE
        try:
            found = path.lstat()
        except FileNotFoundError:
            self._own, self._job_identity = None, None
            return
        identity = (found.st_ino, found.st_size, found.st_mtime_ns)
        if identity != self._job_identity:
            self._own = None
            job = read_json(path, MAX_JOB_BYTES)
            runs = [run for run in own_runs(job) if re.fullmatch(IDENTIFIER_PATTERN, run["run_id"])]
            self._own = {run["run_id"]: RunFile.of(run) for run in runs}
            self._is_local = job.get("backend", "local") == "local"
            self._job_identity = identity

    def _read_runs(self, workers: list[dict[str, Any]], views: Mapping[str, View]) -> list[RunFacts]:
        """Returns the runs; `workers` are those of a job that is running, `views` what its runs see now."""
        own = self._own or {}
        found = [run_id for run_id in run_ids_in(self._directory) if run_id not in own and self._is_run(run_id)]
        run_ids = [*own, *found][:MOST_RUNS]
        self._steps = {run_id: self._steps_of(run_id) for run_id in run_ids}
        self._evaluations = {
            run_id: self._evaluations.get(run_id) or EvaluationResults(self._directory / f"run_{run_id}")
            for run_id in run_ids
        }
        self._files.keep({self._directory / f"run_{run_id}" for run_id in run_ids})
        if self._trained is None:
            self._trained = TrainedEnd(self._directory, len(run_ids))
        unreadable = ""
        try:
            self._trained.refresh()
        except (OSError, UntrustedFileError) as error:
            unreadable = str(error)
        self._in_trainer = steps_in_trainer(self._directory)
        by_name = {worker["name"]: worker for worker in workers if worker["name"].startswith("orchestrator")}
        obstacles = {run_id: view.obstacle for run_id, view in views.items()}
        return [self._read_run(run_id, unreadable, by_name, obstacles.get(run_id, "")) for run_id in run_ids]

    def _steps_of(self, run_id: str) -> NewestSteps:
        path = self._directory / f"run_{run_id}" / "metrics.jsonl"
        return self._steps.get(run_id) or NewestSteps(path)

    def _is_run(self, run_id: str) -> bool:
        run_dir = self._directory / f"run_{run_id}"
        return not run_dir.is_symlink() and any(
            (run_dir / name).exists() for name in ("control/orch.toml", "metrics.jsonl")
        )

    def _read_run(
        self, run_id: str, unreadable: str, starters: Mapping[str, Mapping[str, Any]], obstacle: str
    ) -> RunFacts:
        run_dir = self._directory / f"run_{run_id}"
        is_own = self._own is not None and run_id in self._own
        file = self._own[run_id] if self._own is not None and is_own else self._files.read(run_dir)
        history = History.of(self._directory, run_id, file.steps)
        history.unreadable = unreadable
        history.evaluations = self._evaluations[run_id]
        steps = self._steps[run_id]
        try:
            steps.refresh()
            history.shipped = steps.lines
            history.read_notices()
        except (OSError, UntrustedFileError) as error:
            history.shipped = steps.lines
            history.unreadable = str(error)
        trained = self._trained.runs.get(run_id) if self._trained is not None else None
        history.trained = self._trained_steps(run_id, trained)
        is_guest = self._own is not None and not is_own
        exclusion = exclusion_of(run_dir)
        is_without_orchestrator = (run_dir / FINE_TUNING_FILE).exists() or is_driven(run_dir)
        its = [starters[name] for name in (f"orchestrator_{run_id}", "orchestrator") if name in starters]
        return RunFacts(
            run_id,
            history,
            file,
            (*steps.reward.values(history.last_shipped),),
            is_guest,
            is_without_orchestrator,
            self._first_phase
            or current_state(self._directory, history, is_guest, is_own and is_to_start(run_id, its), obstacle),
            is_running(self._directory)
            if is_without_orchestrator
            else orchestrator_of(self._directory, run_id) is not None,
            _changed(f"{run_dir}/control/paused.json") is not None,
            exclusion,
            None if exclusion is None else _changed(f"{run_dir}/control/{_EXCLUSIONS[exclusion.partition(':')[0]]}"),
            max(_changed(lock_file_of(self._directory, run_id)) or 0.0, _changed(f"{run_dir}/control") or 0.0),
            tuple(trained.mismatch) if trained is not None else (),
            tuple(trained.times) if trained is not None else (),
            (*steps.empty, *(nulls_of(trained.raw) if trained is not None else ())),
            idle_of(steps.lines.values(), trained.phases if trained is not None else ()),
        )

    def _trained_steps(self, run_id: str, newest: NewestTrained | None) -> dict[int, Line]:
        """The newest trained step: its line, or, of a driven run or one that was trained long ago, its number alone."""
        if newest is not None and (line := newest.line):
            return {line["step"]: line}
        return trained_without_lines(self._directory, run_id, self._in_trainer)


_EXCLUSIONS = {"evicted": "evicted.txt", "refused": "config_validation_error.txt"}


def _is_worker(worker: Mapping[str, Any]) -> bool:
    """Whether these are a worker's fields, as far as they are shown."""
    texts = ("name", "state", "status", "trouble", "last_death")
    is_pid = worker.get("pid") is None or type(worker["pid"]) is int
    numbers = all(type(worker.get(name)) in (int, float) for name in ("since", "restarts"))
    return is_pid and numbers and all(isinstance(worker.get(name), str) for name in texts)


def _changed(path: str | Path) -> float | None:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return None


def _disk(directory: Path) -> tuple[int | None, int | None]:
    """The size and the free bytes of the disk that holds the directory."""
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return None, None
    return usage.total, usage.free
