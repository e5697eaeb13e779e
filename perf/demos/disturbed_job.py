"""A job of `cluster` whose workers and master the demo kills. It waits until each is there again, and keeps the times."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from counterpoint.cluster import JobFailed, JobSpec, JobStatus, NoMaster, WorkerStatus, submit
from counterpoint.cluster.job_files import read_master
from counterpoint.cluster.spec import MASTER, role_of
from perf.commands import DemoError

PATIENCE_SECONDS = 300.0
"""The deadline of each wait."""

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Place:
    """Where jobs run."""

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kill:
    """What happened to one process."""

    role: str
    """The worker's role, or `master`."""
    seconds: float
    """Seconds from the signal until its successor worked."""


class DisturbedJob:
    """A running job. Leaving the block stops it, if it has not ended."""

    def __init__(self, spec: JobSpec, directory: Path, place: Place, say: Callable[[str], None]) -> None:
        self.directory = directory
        self.kills: list[Kill] = []
        self._say = say
        self.handle = submit(spec, directory, place.backend, options=place.options)

    def __enter__(self) -> DisturbedJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.handle.outcome() is None:
            self.handle.stop("the demo has ended")
            self.end()

    def status(self) -> JobStatus | None:
        """Returns the job's state; None while it has no master."""
        try:
            return self.handle.status()
        except NoMaster:
            return None

    def worker(self, name: str) -> WorkerStatus | None:
        """Returns a worker's state; None while the job has no master, or one that does not act yet."""
        status = self.status()
        return None if status is None else next((one for one in status.workers if one.worker == name), None)

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Waits for a condition while the job runs. Raises `DemoError`."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if (outcome := self.handle.outcome()) is not None:
                raise DemoError(f"the job ended ({outcome.reason}) while this waited for {what}")
            if time.monotonic() > deadline:
                raise DemoError(f"waited {PATIENCE_SECONDS:g} s for {what}, in vain; see {self.directory}")
            time.sleep(POLL_SECONDS)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Kills a worker, or stops it by SIGSTOP, and waits for its next incarnation to run."""
        self.until(f"{name} to run", lambda: self._runs(name, 0))
        found = self.worker(name)
        if found is None or found.pid <= 0:
            raise DemoError(f"{name} has no process that could be killed: {found}")
        began = time.monotonic()
        os.kill(found.pid, number)
        self.until(f"another {name}", lambda: self._runs(name, found.incarnation))
        self._note(name, found.pid, began, f"incarnation {found.incarnation + 1} runs", number)

    def kill_master(self) -> None:
        """Kills the master by SIGKILL and waits until its standby has taken over."""
        known = read_master(self.directory)
        if known is None:
            raise DemoError(f"{self.directory} names no master")
        began = time.monotonic()
        os.kill(known.pid, signal.SIGKILL)

        def taken_over() -> bool:
            status = self.status()
            return status is not None and status.epoch > known.epoch

        self.until("the standby to take over", taken_over)
        self._note(MASTER, known.pid, began, "the standby has taken over; no worker was touched")

    def end(self) -> str:
        """Waits for the job's end; returns what went wrong, or nothing."""
        try:
            outcome = self.handle.wait(PATIENCE_SECONDS)
        except (JobFailed, TimeoutError) as error:
            return str(error)
        return "" if outcome.reason == "done" else f"the job ended: {outcome.reason}"

    def _runs(self, name: str, after: int) -> bool:
        worker = self.worker(name)
        return worker is not None and worker.incarnation > after and worker.stage in ("RUNNING", "FINISH")

    def _note(self, who: str, pid: int, began: float, then: str, number: signal.Signals = signal.SIGKILL) -> None:
        kill = Kill(role_of(who) or who, time.monotonic() - began)
        self.kills.append(kill)
        done = "stopped" if number == signal.SIGSTOP else "killed"
        self._say(f"{done} {who} (process {pid}); {kill.seconds:.1f} s later {then}")
