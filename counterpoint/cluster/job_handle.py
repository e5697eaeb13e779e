"""Submits a job, and talks to its master: from the program that submitted it, or from any other on the machine.

The master is a process of its own, and the job outlives the program that submitted it. By default a second process waits to
take over should the master be killed; `wait` also starts another one if it finds none.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from counterpoint.cluster import job_files
from counterpoint.cluster.builder import require_json
from counterpoint.cluster.errors import ClusterError, JobExists, JobFailed
from counterpoint.cluster.job_status import JobStatus, WorkerStatus, worker_status
from counterpoint.cluster.manager.ending import STOPPED_EARLY
from counterpoint.cluster.manager.events import ManagerStage, Outcome
from counterpoint.cluster.manager.state import first_state
from counterpoint.cluster.master.backend_choice import backend_class
from counterpoint.cluster.master.control import ControlError, NoMaster, NotStarted, ask, unknown_role
from counterpoint.cluster.master.orders import LOGS, log_file
from counterpoint.cluster.master.standby import reaped, start_master
from counterpoint.cluster.spec import MASTER, JobSpec, sub_master_name
from counterpoint.cluster.worker_classes import require_classes, search_path
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.lock import holder_of
from counterpoint.transport.files.wrong_types import first_wrong

logger = logging.getLogger(__name__)

OUTPUTS = "outputs"
"""The directory where jobs are made that are given none."""

START_SECONDS = 180.0
"""Longest time for a master to answer after it was started. Ray starts three processes for it, one after another."""

POLL_SECONDS = 0.05

END_SECONDS = 5.0
"""How long `wait` waits for the master's process after the job's end."""

GRACE_SECONDS = 2.0
"""How long a job may be without a master, so that its standby takes over, before `wait` starts one."""

MAX_LOG_BYTES = 4 * 2**20
"""What is read of a log: its end."""


_STATUS = TypeAdapter(JobStatus)


def submit(
    spec: JobSpec,
    directory: str | Path | None = None,
    backend: str = "local",
    *,
    standby: bool = True,
    journal: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> JobHandle:
    """Starts a job in a directory of its own, and returns once its master answers.

    Without `directory` it is the first of `outputs/NAME`, `outputs/NAME-2` and so on that is not there or empty.
    `backend` is `local`, `ray`, or the import path of a class; `options` are further arguments of it. With `standby` a second
    process waits to take over should the master be killed. `journal` is where the job's state lies (a directory, s3:// or gs://),
    if it is not to be in the job's directory. Raises `UserError` for a spec that cannot be run, `JobExists` if the directory has
    a job already, `ClusterError` if the master does not start.
    """
    handle = PrimeMaster.create(spec, directory, backend, standby=standby, journal=journal, options=options)
    handle.start_master()
    return handle


def worker_logs(directory: Path) -> dict[str, Path]:
    """Returns the path of each worker's output that is there, by the worker's name. Raises `ClusterError` if there is no job."""
    handle = JobHandle(directory)
    found = {path.stem: path for path in sorted((handle.directory / LOGS).glob("*.log"))}
    workers = {
        worker: role for role in handle.spec.roles for worker in (*role.worker_names, sub_master_name(role.name))
    }
    own = {worker: log for worker, role in workers.items() if (log := role.log_of(worker)) is not None}
    return found | {worker: path for worker, path in own.items() if path.exists()}


class JobHandle:
    """A job, by its directory."""

    def __init__(self, directory: str | Path) -> None:
        """Raises `ClusterError` if the directory has no job."""
        self.directory = Path(directory).resolve()
        self._job = job_files.read_job(self.directory)
        self._control = job_files.control_path(self.directory)
        self._children: list[int] = []
        """Masters that this process started and did not reap."""

    @property
    def spec(self) -> JobSpec:
        """The job."""
        return self._job.spec

    def start_master(self) -> None:
        """Starts a master, and returns once one answers, or the job has ended; it waits if the job has another.

        Raises `ClusterError` with the end of its log if it does not start.
        """
        pid = start_master(self.directory, *(["--keep-standby"] if self._job.standby else []))
        self._children.append(pid)
        deadline = time.monotonic() + START_SECONDS
        while not (self._was_begun and self._master_answers()) and self.outcome() is None:
            if (pid not in self._children or self._reap(pid)) and self.outcome() is None:
                raise ClusterError(f"the master of {self.directory} did not start:\n{self.logs(MASTER, 15)}")
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the master of {self.directory} does not answer after {START_SECONDS:g} s:\n{self.logs(MASTER, 15)}"
                )
            time.sleep(POLL_SECONDS)

    def await_master(self) -> None:
        """Returns once a master answers, or the job has ended. Starts one if none answers in time. Raises as `start_master`."""
        self._attend(lambda: self._master_answers() or self.outcome() is not None, None, START_SECONDS)

    def _attend(self, is_over: Callable[[], bool], timeout: float | None, patience: float = GRACE_SECONDS) -> None:
        """Returns once `is_over`; starts another master if the job has none. Raises `TimeoutError`, and as `start_master`.

        `patience`: how long a job may have no master that never had one.
        """
        began = seen = time.monotonic()
        while not is_over():
            now = time.monotonic()
            if timeout is not None and now - began >= timeout:
                raise TimeoutError(
                    f"{self.directory}: the job has not ended within {timeout:g} s; `status` says how far it is"
                )
            if self._master_lives():
                seen = now
            elif now - seen > (GRACE_SECONDS if self._was_begun else patience):
                logger.warning("%s has no master; another one is started", self.directory)
                self.start_master()
                seen = time.monotonic()
            time.sleep(POLL_SECONDS)

    def status(self) -> JobStatus:
        """Returns the state of the job and its workers; all are in INIT before the job is started.

        Raises `NoMaster` if none answers and the job has not ended, `ClusterError` if its last status is damaged.
        """
        if (ended := job_files.read_outcome(self.directory)) is None:
            try:
                return _STATUS.validate_python(self._ask({"ask": "status"}))
            except NotStarted as error:
                records = first_state(self.spec).workers.values()
                workers = tuple(worker_status(one, self.log_path(one.name)) for one in records)
                return JobStatus(self.spec.name, str(ManagerStage.INIT), 0, str(error), workers)
            except NoMaster:  # perhaps it has ended just now
                if (ended := job_files.read_outcome(self.directory)) is None:
                    raise
        return self._last_status(ended)

    def get_nodes_by_role(self, role: str) -> tuple[WorkerStatus, ...]:
        """Returns the workers of a role, its SubMaster included. Raises as `status`, `ControlError` for an unknown role."""
        if role not in (names := [one.name for one in self.spec.roles]):
            raise unknown_role(role, names)
        return tuple(one for one in self.status().workers if one.role == role)

    def outcome(self) -> Outcome | None:
        """Returns how the job ended; None while it has not."""
        ended = job_files.read_outcome(self.directory)
        return None if ended is None else _outcome(ended)

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> Outcome:
        """Returns the job's outcome when its work is complete. Starts another master if the job has none.

        Raises `JobFailed` if it failed or was stopped before that, unless `raise_on_failure` is false; `TimeoutError` after
        `timeout` seconds; `ClusterError` if no master can be started.
        """
        self._attend(lambda: self.outcome() is not None, timeout)
        outcome = self.outcome()
        assert outcome is not None
        end = time.monotonic() + END_SECONDS
        while self._master_lives() and time.monotonic() < end:  # it ends by itself, now that the outcome is written
            time.sleep(POLL_SECONDS)
        if outcome.code != 0 and raise_on_failure:
            raise JobFailed(
                f"job {self.spec.name!r} in {self.directory} ended with exit code {outcome.code}: {outcome.reason}",
                outcome.code,
            )
        return outcome

    def stop(self, reason: str = "stopped by its user", code: int = STOPPED_EARLY) -> None:
        """Asks the job to stop in order; a second time at least a second later kills it. `wait` for its end.

        `code` is its exit code if everything ends cleanly before its work is complete. Nothing happens if it has ended. Raises
        `NoMaster`, and `NotStarted` before the job is started.
        """
        if self.outcome() is None:
            try:
                self._ask({"ask": "stop", "reason": reason, "code": code})
            except (NoMaster, ControlError):  # a master that is about to end answers no more
                if self.outcome() is None:
                    raise

    def stop_and_wait(self) -> Outcome:
        """Stops the job and waits for its end. Starts another master if the job has none, so that it ends in order, too.

        Raises as `wait`.
        """
        try:
            self.stop()
        except NoMaster:
            self.start_master()
            self.stop()
        return self.wait()

    def scale(self, role: str, count: int) -> None:
        """Asks for another number of workers, between the role's limits. Raises `NoMaster`, `ControlError` with its reason."""
        self._ask({"ask": "scale", "role": role, "count": count})

    def logs(self, worker: str, lines: int = 50) -> str:
        """Returns the last lines of a worker's output; those of the master for `master`. Empty if there are none yet.

        Raises `UserError` for a name that the job cannot have.
        """
        path = self.log_path(worker)
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - MAX_LOG_BYTES))
                text = file.read(MAX_LOG_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:]) if lines > 0 else ""

    def log_path(self, worker: str) -> Path:
        """Returns the path of a worker's output. Raises `UserError` as `logs`."""
        if worker == MASTER:
            return self.directory / job_files.MASTER_LOG
        try:
            return log_file(self.spec, self.directory, worker)
        except KeyError:
            roles = ", ".join(role.name for role in self.spec.roles)
            raise UserError(
                f"{worker!r} is no worker of {self.spec.name!r}; names are ROLE-RANK, its roles are {roles}"
            ) from None

    def _last_status(self, file: job_files.OutcomeFile) -> JobStatus:
        """The status with which the job ended. Raises `ClusterError` if it is damaged."""
        try:
            return replace(_STATUS.validate_python(file.status), outcome=_outcome(file))
        except ValidationError as error:
            raise ClusterError(
                f"status in {self.directory / job_files.OUTCOME_FILE} is damaged: {first_wrong(error)}; "
                f"`counterpoint wait {self.directory}` still says how the job ended"
            ) from None

    # --- the master ---

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises as `ask`, and `NotStarted` if no master has ever begun the job."""
        try:
            return ask(self._control, request)
        except NoMaster:
            if self._was_begun:
                raise
            raise NotStarted(
                f"job {self.spec.name!r} in {self.directory} is not started: `PrimeMaster.start` or `counterpoint wait "
                f"{self.directory}` starts it"
            ) from None

    @property
    def _was_begun(self) -> bool:
        """Whether the job ever had a master."""
        return (self.directory / job_files.MASTER_FILE).exists()

    def _master_answers(self) -> bool:
        try:
            ask(self._control, {"ask": "status"})
        except NoMaster:
            return False
        return True

    def _master_lives(self) -> bool:
        """Whether a process is the master."""
        for pid in list(self._children):
            self._reap(pid)
        return holder_of(self.directory / job_files.LOCK_FILE) is not None

    def _reap(self, pid: int) -> bool:
        """Whether a master that this process started has ended."""
        if not reaped(pid):
            return False
        if pid in self._children:
            self._children.remove(pid)
        return True


class PrimeMaster(JobHandle):
    """The driver's end of a job that it makes: `create`, then `start`; the master is a process of its own."""

    @classmethod
    def create(
        cls,
        config: JobSpec,
        directory: str | Path | None = None,
        backend: str = "local",
        *,
        standby: bool = True,
        journal: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> PrimeMaster:
        """Makes a job in a directory of its own, which `start` starts.

        The arguments are those of `submit`, and it raises `UserError` and `JobExists` for the same reasons.
        """
        require_json(config)
        path = search_path()
        require_classes(config, path)
        backend_class(backend)
        job = job_files.JobFile(
            spec=config, backend=backend, options=dict(options or {}), journal=journal, standby=standby, path=path
        )
        for place in [Path(directory)] if directory is not None else _free_directories(config.name):
            place = place.resolve()
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                job_files.write_privately(place / job_files.JOB_FILE, job, new=True)
            except FileExistsError:
                continue
            return cls(place)
        raise JobExists(f"{place} has a job already; attach to it with JobHandle({str(place)!r}), or choose another")

    def start(self, timeout: float | None = None) -> JobStatus:
        """Starts the job, and returns its status once it is RUNNING, or has ended already with its work complete.

        Raises `JobFailed` if it ended otherwise, `TimeoutError` after `timeout` seconds, in which it goes on, and as `submit`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self.start_master()
        while self.outcome() is None:
            status = self.status()
            if status.stage == ManagerStage.RUNNING:
                return status
            if deadline is not None and time.monotonic() >= deadline:
                late = ", ".join(one.worker for one in status.workers if one.stage == "INIT") or "none"
                raise TimeoutError(f"{self.directory} is {status.stage} after {timeout:g} s; in INIT: {late}")
            time.sleep(POLL_SECONDS)
        self.wait()
        return self.status()


def _free_directories(name: str) -> Iterator[Path]:
    """Yields the directories in which a job may be made that was given none. Another process may take each meanwhile."""
    for number in itertools.count(1):
        place = Path(OUTPUTS) / (name if number == 1 else f"{name}-{number}")
        if not place.exists() or (place.is_dir() and not any(place.iterdir())):
            yield place


def _outcome(file: job_files.OutcomeFile) -> Outcome:
    return Outcome(file.code, file.reason, file.failed_worker)
