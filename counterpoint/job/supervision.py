"""Supervises a job: runs its workers to their end, finds its guests, follows its runs' metrics, and records its state.

`counterpoint/cluster/attended/attended_job.py` runs the workers; this adds what a job is beyond them. `counterpoint/cli/run.py`
shows it.

Next in the reading order of `docs/architecture.md`: `counterpoint/cluster/manager/manager.py`.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from counterpoint.cluster.attended.attended_job import AttendedJob
from counterpoint.cluster.attended.views import shown_name
from counterpoint.cluster.manager.ending import NOT_READY
from counterpoint.cluster.manager.events import Outcome
from counterpoint.cluster.spec import JobSpec, sub_master_name
from counterpoint.cluster.worker_view import ENDED, State, WorkerView
from counterpoint.job.config import JobConfig
from counterpoint.job.directory import control_directory, orchestrator_of, run_ids_in, steps_of
from counterpoint.job.placement import ServersFile
from counterpoint.job.processes_file import ProcessesFile, read_workers, was_stopping
from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.metrics.metrics_lines import Line
from counterpoint.job.reading.metrics.trained_lines import TrainedLines
from counterpoint.job.reading.run_state import committed_steps, exclusion_of, outcome_of_guest, outcome_of_run
from counterpoint.job.reading.summary import SUMMARY_FILE, Summary, summarize, summarize_runs, to_json
from counterpoint.job.serving.service_state import summarize_service
from counterpoint.job.serving.telemetry import JobTelemetry
from counterpoint.job.serving.usage_file import UsageFile
from counterpoint.job.workers import worker_of
from counterpoint.orchestrator.step.discarded import in_words
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.process.child import last_lines
from counterpoint.transport.process.exit_codes import describe_exit, is_explained
from counterpoint.transport.process.notify import Heartbeat, notify
from counterpoint.transport.process.permanent_errors import DISK_FULL, disk_full, is_disk_full

POLL_SECONDS = 0.5

LOOK_SECONDS = 0.5
"""Time in which one look reads the runs' new steps. Of a run that has more, the next look reads on."""

END_SECONDS = 30.0
"""Longest time for which the job, once it has ended, reads what its runs had written."""

DISK_SECONDS = 60.0
"""Time for which a worker has to be ready after it died of a full disk, before there is space again."""

MOST_SHOWN = 20
"""Steps of a run that one look shows, the newest: a guest that joins with thousands, or writes so many, is not to hold it up."""

MOST_UNSEEN = 1000
"""States that wait to be shown while the terminal or the file system holds up the thread that shows them."""

_JOB = ""
"""What stands, beside runs and files, for the job as a whole among those that were warned about."""

Show = Callable[[list[WorkerView], list[tuple[History, Line]]], None]
"""Shows the workers' states, and the new steps, each with its run."""


class SystemdNotifications:
    """Sends heartbeats, and each state of the job once until it changes. The two may be sent from different threads."""

    def __init__(self, services: Collection[str]) -> None:
        """`services` names the workers that must be ready before the job is: trainer and servers, not what it can do without."""
        self._services = services
        self._heartbeat = Heartbeat()
        self._sent: set[str] = set()

    def beat(self) -> None:
        """Sends a heartbeat. Call it from the loop that supervises the job, or between the parts of longer work."""
        self._heartbeat.beat()

    def report(self, job: State, workers: Mapping[str, State], progress: str) -> None:
        """Sends what has changed: the readiness of the services, the job's end, the runs' progress."""
        if all(workers[name] is State.READY for name in self._services):
            self.report_ready()
        if job is State.STOPPING:
            self._send("STOPPING=1")
        self._send(f"STATUS={job}: {progress}")

    def report_ready(self) -> None:
        """Sends that the job is ready."""
        self._send("READY=1")

    def _send(self, message: str) -> None:
        if message not in self._sent and notify(message):
            self._sent = {*(sent for sent in self._sent if not sent.startswith("STATUS=")), message}


@dataclass(frozen=True, slots=True)
class FailedWorker:
    """A worker that failed, with the end of its output if nothing else says why."""

    name: str
    death: str
    """How it died, in words."""
    log_file: Path
    last_lines: list[str]
    """Empty if its death is explained."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The state of the job and of its workers at one moment."""

    job: State
    workers: list[WorkerView]

    def states(self) -> dict[str, State]:
        """Returns the state of each worker by its name."""
        return {worker.name: worker.state for worker in self.workers}

    def without_status(self) -> _Snapshot:
        """Returns the same without what the workers say that they are doing, which changes with each step."""
        return _Snapshot(self.job, [replace(worker, status="") for worker in self.workers])


class SupervisedJob:
    """A job's workers, its guests, and the metrics of all their runs."""

    def __init__(
        self,
        config: JobConfig,
        spec: JobSpec,
        warn: Callable[[str], None],
        options: Mapping[str, Any] | None = None,
        on_reload: Callable[[], object] | None = None,
    ) -> None:
        """`warn` is called at the first error in each run's files and in each file of the job. Such errors do not end the job.

        `options` are the backend's; `on_reload` is as of `AttendedJob`.
        """
        self._config = config
        self._warn = warn
        self._warned: set[str] = set()
        """Runs and files that were warned about."""
        self._trouble = ""
        """Why the job's state cannot be written; empty while it can."""
        self._began, self._began_monotonic = time.time(), time.monotonic()
        self._trained = TrainedLines(config.output_dir)
        self.histories = {
            run.run_id: History.of(config.output_dir, run.run_id, run.steps, self._began, self._trained)
            for run in config.every_run
        }
        """The steps of each run by its id, guests included."""
        self._processes_file = ProcessesFile(config.output_dir)
        self._servers_file = ServersFile(config)
        self._usage_file = UsageFile(config.output_dir, config.backend)
        self._notifications = SystemdNotifications(
            [
                shown_name(spec, worker)
                for role in spec.roles
                if role.essential and not role.task
                for worker in role.worker_names
            ]
        )
        self._show: Show = lambda workers, steps: None
        self._unseen: deque[_Snapshot] = deque(maxlen=MOST_UNSEEN)
        """The states of the job that were not shown yet."""
        self._changed = asyncio.Event()
        self._telemetry: JobTelemetry | None = None
        self._files = threading.Lock()
        """Held by the thread that reads or writes the job's files. The loop does neither: a file system may hang."""
        self._read_new_steps()  # those of an earlier invocation are not shown
        earlier = read_workers(config.output_dir) if config.resume else []
        self._job = AttendedJob(
            spec,
            control_directory(config.output_dir),
            self._on_change,
            self._find_guests,
            {worker["name"]: worker["log_from"] for worker in earlier if worker["log_from"] is not None},
            backend=config.backend,
            options=options,
            on_reload=on_reload,
            on_trouble=self._on_state_trouble,
        )
        self._last = _Snapshot(self._job.state, self._job.views())

    def run(self, show: Show) -> Outcome:
        """Runs the job to its end. Calls `show` about twice a second and on each change of a worker's state."""
        self._show = show
        with JobTelemetry(
            self._config.prometheus_host, self._config.prometheus_port, self._config.output_dir
        ) as self._telemetry:
            outcome = asyncio.run(self._supervise())
        self._job.observe(self._find_guests, None)  # one that came since the last look is in the summary, too
        self._job.observe(self._report_end, None)
        return outcome

    @property
    def is_complete(self) -> bool:
        """Whether every run of the job has shipped all its steps."""
        return all(self.histories[run.run_id].step >= run.steps for run in self._config.every_run)

    def failed_workers(self, outcome: Outcome) -> list[FailedWorker]:
        """Returns the workers that failed, and the one that missed the deadline of its start if that ended the job.

        Left out are runs that were evicted or refused, whose reason is in the summary, and workers that were killed on request.
        """
        excluded = {worker_of(self._config, run) for run in self._config.runs if exclusion_of(run.run_dir) is not None}
        spec = self._job.spec
        log_files = {
            shown_name(spec, worker): log
            for role in spec.roles
            for worker in (*role.worker_names, sub_master_name(role.name))
            if (log := role.log_of(worker)) is not None
        }
        return [
            _failed(view, log_files[view.name])
            for view in self._job.views()
            if (view.state is State.FAILED or view.name == outcome.failed_worker)
            and view.name not in excluded
            and view.last_death
        ]

    def summary(self, outcome: Outcome) -> Summary:
        """Computes the job's summary, that of its run if it has only one."""
        directory, histories = self._config.output_dir, list(self.histories.values())
        elapsed = time.monotonic() - self._began_monotonic
        if len(histories) == 1:
            summary = summarize(histories[0], directory, elapsed, outcome.reason)
        else:
            summary = summarize_runs(histories, self._outcomes(), directory, elapsed, outcome.reason)
        if self._config.tinker is not None:
            summary["service"] = summarize_service(directory)
        return summary

    def write_summary(self, summary: Summary) -> Path | None:
        """Writes `summary.json`; returns its path, or None if that failed, after a warning."""
        path = self._config.output_dir / SUMMARY_FILE
        try:
            write_atomically(path, to_json(summary))
        except OSError as error:
            self._warn_once(path.name, f"{path.name} cannot be written: {error}")
            return None
        return path

    async def _supervise(self) -> Outcome:
        watching = asyncio.create_task(self._watch(), name="watching the job")
        try:
            outcome = await self._job.run(adopt=self._can_adopt())
        finally:
            watching.cancel()
        if outcome.code == 0:
            self._notifications.report_ready()  # systemd takes a job that ends before it is ready for a failed start
            return await asyncio.to_thread(self._checked, outcome)
        return outcome

    def _checked(self, outcome: Outcome) -> Outcome:
        """Returns the outcome of a job whose processes have all ended with 0, which is a failure if a run lacks steps."""
        for run in self._config.every_run:
            history = History.of(run.output_dir, run.run_id)
            history.refresh()
            step = max(history.step, committed_steps(run))  # one look may not reach the end of a long file
            if exclusion_of(run.run_dir) is None and step < run.steps:
                worker, steps = worker_of(self._config, run), f"{step} of {run.steps} steps"
                reason = f"ended with exit code 0 after {steps}; does code in its process call os._exit?"
                return Outcome(1, f"{worker} {reason}", worker)
        return outcome

    def _can_adopt(self) -> bool:
        """Whether to go on with what an earlier command left running.

        Not if it was being stopped, or if one of its runs was: the run's end would be that of the job.
        """
        if not self._config.resume or was_stopping(self._config.output_dir):
            return False
        return self._config.backend != "local" or all(
            worker["state"] in ENDED or self._is_alive(run.run_id)
            for run in self._config.every_run
            for worker in read_workers(self._config.output_dir)
            if worker["name"] == worker_of(self._config, run)
        )

    async def _watch(self) -> None:
        """Reports about twice a second, and at each change but of a status.

        The heartbeats are the loop's: a file that takes long to read does not delay them.
        """
        while True:
            look = asyncio.create_task(
                asyncio.to_thread(self._job.observe, self._report, None), name="looking at the job"
            )
            self._notifications.beat()
            while (await asyncio.wait([look], timeout=POLL_SECONDS))[1]:
                self._notifications.beat()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._changed.wait()
            self._changed.clear()

    def _on_change(self, job: AttendedJob) -> None:
        now = _Snapshot(job.state, job.views())
        if self._telemetry is not None:
            self._telemetry.show(now.job, now.workers, job.heard, len(self.histories))
        if now != self._last:
            if now.without_status() != self._last.without_status():
                self._changed.set()
            self._last = now
            self._unseen.append(now)

    def _on_state_trouble(self, trouble: str) -> None:
        self._trouble = trouble
        self._changed.set()

    def _report(self) -> None:
        """Shows and records what has changed."""
        with self._files:
            unseen = [self._unseen.popleft() for _ in range(len(self._unseen))]
            last = unseen[-1] if unseen else self._last
            progress = ", ".join(map(progress_of, self.histories.values()))
            self._notifications.report(last.job, last.states(), progress or "no run")
            self._write_files(last)  # first: what cannot be shown must not keep it from those who look from outside
            for earlier in unseen[:-1]:
                self._show(earlier.workers, [])
            self._show(last.workers, self._read_new_steps(LOOK_SECONDS))

    def _report_end(self) -> None:
        """Reports until all that the runs had written is read, within `END_SECONDS`."""
        until = time.monotonic() + END_SECONDS
        while True:
            self._notifications.beat()
            self._report()
            if time.monotonic() > until or not any(history.is_behind for history in self.histories.values()):
                return

    def _write_files(self, snapshot: _Snapshot) -> None:
        """Writes the job's files; says once that the disk is full, and once that it is not any more."""
        trouble = self._trouble
        for file in (self._processes_file, self._servers_file, self._usage_file):
            try:
                file.write(snapshot.job, snapshot.workers)
            except OSError as error:
                if is_disk_full(error):
                    trouble = trouble or disk_full(self._config.output_dir)
                else:
                    self._warn_once(file.path.name, f"{file.path.name} cannot be written: {error}")
        if not trouble and any(map(_waits_for_disk, snapshot.workers)):
            trouble = disk_full(self._config.output_dir)
        if trouble:
            self._warn_once(_JOB, trouble)
        elif _JOB in self._warned:
            self._warned.remove(_JOB)
            self._warn(f"{self._config.output_dir} can be written again: the job goes on")

    def _find_guests(self) -> Sequence[str]:
        """The runs with a live orchestrator that is not a worker of this job. They need its trainer and servers."""
        states, directory = self._last.states(), self._config.output_dir
        workers = {
            run.run_id: states.get(worker_of(self._config, run), State.STOPPED) for run in self._config.every_run
        }
        own = {run_id for run_id, state in workers.items() if state not in ENDED}
        with self._files:
            guests = [run_id for run_id in run_ids_in(directory) if run_id not in own and self._is_alive(run_id)]
            for run_id in guests:
                found = History.of(directory, run_id, since=self._began, trained=self._trained)
                history = self.histories.setdefault(run_id, found)
                if history.steps is None:  # a guest takes its lock before it writes its configuration
                    history.steps = steps_of(directory, run_id)
        return guests

    def _is_alive(self, run_id: str) -> bool:
        """Whether the run has an orchestrator. A run whose directory is unreadable counts as having none."""
        try:
            return orchestrator_of(self._config.output_dir, run_id) is not None
        except OSError as error:
            self._warn_once(run_id, f"run {run_id} cannot be read: {error}")
            return False

    def _read_new_steps(self, seconds: float = math.inf) -> list[tuple[History, Line]]:
        """Reads the new steps, each run's for its share of the seconds; returns the newest of each run."""
        new: list[tuple[History, Line]] = []
        for history in self.histories.values():
            fresh = history.refresh(time.monotonic() + seconds / len(self.histories))
            new += [(history, line) for line in fresh[-MOST_SHOWN:]]
            if history.unreadable and not history.is_behind:
                self._warn_once(history.run_id, f"run {history.run_id} cannot be read: {history.unreadable}")
        return new

    def _warn_once(self, subject: str, message: str) -> None:
        """Warns about a run or a file, unless it was warned about before."""
        if subject not in self._warned:
            self._warned.add(subject)
            self._warn(message)

    def _outcomes(self) -> dict[str, str]:
        """The outcome of each run by its id."""
        views: dict[str, WorkerView] = {view.name: view for view in self._job.views()}
        directory = self._config.output_dir
        guests = {run_id: outcome_of_guest(directory, history) for run_id, history in self.histories.items()}
        own = {
            run.run_id: outcome_of_run(run, self.histories[run.run_id], views.get(worker_of(self._config, run)))
            for run in self._config.every_run
        }
        return guests | own


def progress_of(history: History) -> str:
    """Returns how far a run is, in words; where nothing ships, also why."""
    words = f"{history.run_id} step {history.progress}"
    if history.no_difference is not None:
        return f"{words} ({history.no_difference})"
    return f"{words} ({in_words(history.discarded)})" if history.discarded.get("notable") else words


def _waits_for_disk(view: WorkerView) -> bool:
    """Whether a worker died of a full disk, and has not worked for a while since."""
    if not view.last_death.startswith(describe_exit(DISK_FULL)):
        return False
    is_young = view.state is State.READY and time.time() - view.since < DISK_SECONDS
    return is_young or view.state in (State.RESTARTING, State.EXITED, State.WAITING, State.STARTING)


def _failed(view: WorkerView, log_file: Path) -> FailedWorker:
    last = [] if is_explained(view.last_death) else last_lines(log_file, start=view.log_from or 0)
    doing = f" ({view.status})" if view.last_death.startswith(NOT_READY) and view.status else ""
    return FailedWorker(view.name, view.last_death + doing, log_file, last)
