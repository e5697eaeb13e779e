"""The status of a job, read from its directory: its runs, their states, its processes and the last errors."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from counterpoint.cluster.remains import start_of
from counterpoint.cluster.worker_view import ENDED, State
from counterpoint.job.directory import JOB_FILE, is_running, own_steps, read_json, run_ids_in, steps_of
from counterpoint.job.processes_file import read_workers
from counterpoint.job.reading.activity.fleet import View, read_views, steps_in_trainer, trained_without_lines
from counterpoint.job.reading.fine_tuning import FINE_TUNING, FineTuning, fine_tuning_of
from counterpoint.job.reading.log_errors import last_errors_of_guests, last_errors_of_workers
from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.metrics.trained_lines import TrainedLines
from counterpoint.job.reading.run_state import current_state, exclusion_of, is_driven, is_to_start
from counterpoint.orchestrator.rollouts.failures import sum_failures
from counterpoint.orchestrator.step.phases import sum_phases
from counterpoint.transport.errors import UserError
from counterpoint.transport.outages import OpenOutage
from counterpoint.transport.printable import printable

SHIPPED_METRICS = ("reward/mean", "staleness/mean", "event_loop_lag/p99", "event_loop_lag/max")
TRAINED_METRICS = ("mismatch_kl",)

_SHOWN = (
    "run_id",
    "state",
    "verdict",
    "step",
    "steps",
    "trained",
    *SHIPPED_METRICS,
    *TRAINED_METRICS,
    "tokens_per_second",
)
"""The columns of the table that a notebook shows."""

START_SECONDS = 60.0
"""Longest time from a worker's state `starting` to the start of its process."""


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The status of a job at one moment."""

    directory: Path
    own: dict[str, int] | None
    """The configured steps of the job's own runs; None without a job, if the roles were started one by one."""
    histories: dict[str, History]
    """The histories of the job's own runs and of guests, by run id."""
    workers: list[dict[str, Any]]
    """The content of `processes.json`."""
    running: bool
    """Whether `counterpoint run` is running."""
    is_local: bool = True
    """Whether the job's processes are all on one machine."""
    views: dict[str, View] = field(default_factory=dict)
    """What each run that lives sees of servers and trainer, by run id."""

    fine_tuning: FineTuning | None = None
    """The supervised fine-tuning with which the job begins, if it does."""

    def state_of(self, run_id: str) -> str:
        """Returns the run's state in a word or two."""
        if self.fine_tuning is not None and self.fine_tuning.weights is None and self.running:
            return FINE_TUNING
        is_guest = run_id in self.guests
        to_start = self.running and not is_guest and is_to_start(run_id, self.workers)
        obstacle = self.views[run_id].obstacle if run_id in self.views else ""
        return current_state(self.directory, self.histories[run_id], is_guest, to_start, obstacle)

    def outages_of(self, run_id: str) -> list[OpenOutage]:
        """Returns what is out for the run at present."""
        return self.views[run_id].outages if run_id in self.views else []

    def exclusion_of(self, run_id: str) -> str | None:
        """Returns why the trainer may not train the run; None if it may."""
        return exclusion_of(self.directory / f"run_{run_id}")

    @property
    def guests(self) -> set[str]:
        """The ids of the runs that are not the job's own; empty without a job."""
        return {run_id for run_id in self.histories if self.own is not None and run_id not in self.own}

    def first_starts(self, role: str) -> bool:
        """Returns whether a worker of a role starts for the first time: it is waited for as a matter of course."""
        return self.running and any(
            worker["name"].startswith(role) and worker["state"] in (State.WAITING, State.STARTING)
            for worker in self.workers
            if not worker["restarts"]
        )

    def inference_failed(self, run_id: str) -> int:
        """Returns how many of the run's rollouts got no answer from inference."""
        return int(sum(line.get("rollouts/inference_failed", 0) for line in self.histories[run_id].counted))

    def last_errors(self) -> dict[str, str]:
        """Returns the newest error line by the name of the worker or of the guest's run."""
        of_workers = last_errors_of_workers(self.directory, self.workers, killed=self.supervisor_gone is not None)
        return of_workers | last_errors_of_guests(self.directory, self.guests)

    @property
    def supervisor_gone(self) -> str | None:
        """Returns what is to be done if the job's command was killed: no worker of its is looked after then. Else None."""
        if self.running or all(worker["state"] in ENDED for worker in self.workers):
            return None
        return "no `counterpoint run` holds the job's lock: its command was killed. Start it again with --resume"

    def is_alive(self, worker: dict[str, Any]) -> bool | None:
        """Returns whether a worker's process is alive; None if that cannot be told, since it may be on another machine.

        When their supervisor was killed, workers live on for some seconds. Without it, a process with a worker's number is the
        worker only if it began when the worker did.
        """
        if worker["pid"] is None:
            return False
        if not self.is_local:
            return None if self.running else False
        ticks = start_of(worker["pid"])
        if ticks is None or self.running:
            return ticks is not None
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        began = boot + ticks / os.sysconf("SC_CLK_TCK")
        return bool(began < worker["since"] + START_SECONDS)

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: a row a run, and the last errors. What others wrote is escaped."""
        rows = [{**run, **run["metrics"]} for run in self.as_json()["runs"]]
        columns = [name for name in _SHOWN if any(row.get(name) is not None for row in rows)]
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        body = "".join(f"<tr>{''.join(map(_cell, (row.get(name) for name in columns)))}</tr>" for row in rows)
        said = [f"{name}: {line}" for name, line in (self.last_errors() if self.workers else {}).items()]
        said += [self.supervisor_gone] if self.supervisor_gone else []
        notes = "".join(f"<pre>{escape(printable(text))}</pre>" for text in said)
        state = "running" if self.running else "not running"
        return f"<p>{escape(str(self.directory))}: {state}</p><table><tr>{head}</tr>{body}</table>{notes}"

    def as_json(self) -> dict[str, Any]:
        """Returns the status for programs. Metrics that are unknown are absent."""
        return {
            "directory": str(self.directory),
            "running": self.running,
            "supervisor_gone": self.supervisor_gone,
            "fine_tuning": self.fine_tuning and self.fine_tuning.as_json(),
            "runs": [self._run_as_json(run_id) for run_id in self.histories],
            "processes": [{**worker, "alive": self.is_alive(worker)} for worker in self.workers],
            "last_errors": self.last_errors() if self.workers else {},
        }

    def _run_as_json(self, run_id: str) -> dict[str, Any]:
        history = self.histories[run_id]
        shipped, trained = history.last_shipped, history.last_trained
        return {
            "run_id": run_id,
            "state": self.state_of(run_id),
            "verdict": self.exclusion_of(run_id),
            "outages": [asdict(outage) for outage in self.outages_of(run_id)],
            "step": history.step,
            "steps": history.steps,
            "trained": trained.get("step", 0),
            "tokens_per_second": history.tokens_per_second(),
            "early_warnings": [asdict(each) for each in history.early_warnings],
            "discarded": history.discarded or None,
            "failures": sum_failures(history.counted),
            "inference_failed": self.inference_failed(run_id),
            "phase_seconds": sum_phases([shipped]),
            "evaluations": history.evaluations.as_json(),
            "weights": None if history.weights is None else str(history.weights),
            "metrics": {name: shipped[name] for name in SHIPPED_METRICS if name in shipped}
            | {name: trained[name] for name in TRAINED_METRICS if name in trained},
        }


def _cell(value: Any) -> str:
    """A cell of the table that a notebook shows."""
    return f"<td>{escape(printable(f'{value:.4g}' if isinstance(value, float) else str('' if value is None else value)))}</td>"


class StatusReader:
    """Reads the status of one job again and again, each time only what its files gained."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._histories: dict[str, History] = {}
        self._trained = TrainedLines(directory)

    def read(self) -> JobSnapshot:
        """Returns the present status. Raises `UserError` if the directory holds neither a job nor a run."""
        directory = self._directory
        own = own_steps(directory)
        is_local = own is None or read_json(directory / JOB_FILE).get("backend", "local") == "local"
        steps = _steps_of_runs(directory, own)
        known, self._histories = self._histories, {}
        in_trainer = steps_in_trainer(directory)
        for run_id, count in steps.items():
            history = known.get(run_id) or History.of(directory, run_id, trained=self._trained)
            self._histories[run_id] = history
            history.steps = count
            history.refresh()
            if is_driven(directory / f"run_{run_id}"):
                history.trained = trained_without_lines(directory, run_id, in_trainer)
        now = time.time()
        views = {view.run: view for view in read_views(directory) if view.is_current(now)}
        workers = read_workers(directory)
        first = fine_tuning_of(directory)
        return JobSnapshot(directory, own, self._histories, workers, is_running(directory), is_local, views, first)


def read_status(directory: Path) -> JobSnapshot:
    """Reads a job's status once, as `StatusReader.read`."""
    return StatusReader(directory).read()


def _steps_of_runs(directory: Path, own: dict[str, int] | None) -> dict[str, int | None]:
    """Returns the configured steps of the job's own runs and of those that others started here; None where they are unknown."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory" if directory.exists() else f"{directory} does not exist")
    others = [
        run_id
        for run_id in run_ids_in(directory)
        if run_id not in (own or {})
        and any((directory / f"run_{run_id}" / name).exists() for name in ("control/orch.toml", "metrics.jsonl"))
    ]
    if own is None and not others:
        raise UserError(f"{directory} holds neither a job ({JOB_FILE} is missing) nor a run (run_<id>/)")
    return {**(own or {}), **{run_id: steps_of(directory, run_id) for run_id in others}}
