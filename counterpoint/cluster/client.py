"""`Client`: submits jobs made of one function, and finds those that were submitted before.

Each is a job of one role with one worker, whose process calls the function (`counterpoint/cluster/entrypoint.py`). A directory
holds one job, once; so each job of a name has a numbered directory, of which the newest may still run.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from counterpoint.cluster.builder import JobBuilder
from counterpoint.cluster.entrypoint import Entrypoint, is_importing
from counterpoint.cluster.errors import JobExists
from counterpoint.cluster.job_files import JOB_FILE
from counterpoint.cluster.job_handle import OUTPUTS, JobHandle, submit
from counterpoint.cluster.spec import JobSpec, Resources
from counterpoint.transport.errors import UserError

WORKER = "worker"
STOP_SECONDS = 120.0
"""Time for a function to end after the job was asked to stop."""

ResourceConfig = Resources
"""What a job's only worker needs."""


PROJECT = "counterpoint"
_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[([^\]]*)\])?[^;]*(?:;.*extra == ['"]([\w.-]+)['"])?""")


@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """Variables of a process, and extras of which it needs the packages."""

    env_vars: Mapping[str, str] = field(default_factory=dict)
    extras: Sequence[str] = ()

    def check(self) -> None:
        """Raises `UserError` naming packages of the extras that are not installed: nothing is installed on the way."""
        if missing := sorted({package for extra in self.extras for package in _missing_of(extra)}):
            raise UserError(
                f"extras = {list(self.extras)}: not installed: {', '.join(missing)}; "
                f"install {PROJECT}[{','.join(self.extras)}] where the job runs"
            )


def create_environment(
    env_vars: Mapping[str, str] | None = None, extras: Sequence[str] | None = None
) -> ProcessEnvironment:
    """Returns the environment with these variables, which a job's process gets beside those of its node, and extras."""
    return ProcessEnvironment(dict(env_vars or {}), tuple(extras or ()))


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job to submit."""

    name: str
    """It has letters, digits, `_`, `.` and `-`. One job of a name runs at a time."""
    entrypoint: Entrypoint
    resources: Resources = field(default_factory=Resources)
    environment: ProcessEnvironment = field(default_factory=ProcessEnvironment)
    max_retries_failure: int = 0
    """How often in a row the function is called again after it has raised, or its process has died."""

    @property
    def spec(self) -> JobSpec:
        """The job: one task of one role. Raises `UserError` for a bad name."""
        builder = JobBuilder(self.name).role(
            WORKER,
            command=self.entrypoint.command,
            task=True,
            notifies=False,
            resources=self.resources,
            environment=dict(self.environment.env_vars) | self.entrypoint.to_variables(),
            max_restarts=self.max_retries_failure,
            stop_timeout_seconds=STOP_SECONDS,
        )
        return builder.build()


class Client:
    """Submits jobs to a backend. Each has a directory of its own, `DIRECTORY/NAME/NUMBER`."""

    def __init__(self, directory: str | os.PathLike[str] = OUTPUTS, backend: str = "local") -> None:
        """`backend` as of `cluster.submit`."""
        self._directory, self._backend = Path(directory).absolute(), backend

    def submit(self, request: JobRequest) -> JobHandle:
        """Starts the job, or finds it if it runs already, and returns once its master answers.

        Raises `UserError` if a job of that name runs which is another, for a request that cannot be run, and while a process
        imports the function that it is to call; `ClusterError` as `cluster.submit`.
        """
        if is_importing():
            raise UserError(
                f"job {request.name} is submitted while its own process imports the program: submit jobs below "
                "`if __name__ == '__main__':`"
            )
        request.environment.check()
        return submit_or_find(request.spec, self._directory / request.name, self._backend)[0]


def submit_or_find(spec: JobSpec, directory: Path, backend: str) -> tuple[JobHandle, bool]:
    """Returns the newest job of a directory if it has not ended, else a new one; and whether it is new.

    Raises `UserError` if the one that runs is another job, `ClusterError` as `cluster.submit`.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    while True:
        numbers = [int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal()]
        latest = directory / str(max(numbers, default=1))
        earlier = JobHandle(latest) if (latest / JOB_FILE).exists() else None
        if earlier is not None and earlier.outcome() is None:
            break
        new = latest if earlier is None else directory / str(int(latest.name) + 1)
        try:
            return submit(spec, new, backend), True
        except JobExists:  # another process has written the job at the same moment: find it
            continue
    if earlier.spec != spec:
        raise UserError(
            f"job {spec.name} runs already, with another configuration: wait for it with `counterpoint wait {latest}`, or "
            f"stop it with `counterpoint stop {latest}`"
        )
    earlier.await_master()
    return earlier, False


_current: ContextVar[Client | None] = ContextVar("client", default=None)


def current_client() -> Client:
    """Returns the client that `set_current_client` set; without one, a client of this machine and the directory `outputs`."""
    return _current.get() or Client()


@contextlib.contextmanager
def set_current_client(client: Client) -> Iterator[Client]:
    """Makes `current_client` return this client in its block."""
    before = _current.set(client)
    try:
        yield client
    finally:
        _current.reset(before)


def _missing_of(extra: str) -> list[str]:
    known = distribution(PROJECT).metadata.get_all("Provides-Extra") or []
    if extra not in known:
        raise UserError(f"extras: {PROJECT} has no extra {extra!r}; it has {', '.join(sorted(known))}")
    missing: list[str] = []
    for requirement in distribution(PROJECT).requires or []:
        match = _REQUIREMENT.match(requirement)
        if match is None or match[3] != extra:
            continue
        if match[1] == PROJECT:
            missing += [package for other in (match[2] or "").split(",") for package in _missing_of(other.strip())]
        elif not _is_installed(match[1]):
            missing.append(match[1])
    return missing


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
