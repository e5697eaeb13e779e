"""Starts masters as processes of their own, which nobody is the parent of for long; and keeps one that waits to take over.

Whoever waits for the master's lock has it as soon as the master has ended. A master that hangs keeps it: so a standby kills one
of its own machine that takes requests and does not answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from counterpoint.cluster.clock import RunningClock
from counterpoint.cluster.job_files import LOCK_FILE, MASTER_LOG, control_path, machine, read_master
from counterpoint.cluster.master.control import ControlError, NoMaster, ask
from counterpoint.cluster.master.faults import VARIABLE
from counterpoint.transport.files.lock import holder_of
from counterpoint.transport.process.child import spawn

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Seconds between two looks at whether the standby lives."""

POLL_SECONDS = 0.02

HANGS_SHARE = 0.4
"""The share of the job's lease for which a master may not answer, at least `HANGS_SECONDS`: its successor has the rest of it to
reach the keepers, which then stop."""

HANGS_SECONDS = 3.0

ASK_SECONDS = 1.0
"""The least seconds between two requests."""


def start_master(directory: Path, *flags: str) -> int:
    """Starts a master in a session of its own, with its output in the job's `master.log`; returns its pid.

    It survives this process. Whoever lives on as its parent reaps it (`reaped`). Raises `OSError`.
    """
    command = [sys.executable, "-P", "-m", "counterpoint.cluster.master", str(directory), *flags]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE or "--standby" not in flags}
    return spawn(command, directory / MASTER_LOG, environment, session=True, mode=0o600)


def reaped(pid: int) -> bool:
    """Whether a child has ended; it is reaped then. True, too, for a process that is no child of this one."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


class Standby:
    """The standby of an acting master."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pid: int | None = None
        self._watching: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Keeps one standby alive from now on."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="standby")

    async def _watch(self) -> None:
        while True:
            try:
                if self._pid is None or reaped(self._pid):
                    self._pid = start_master(self._directory, "--standby", "--keep-standby")
                    logger.info("process %d waits to take over", self._pid)
            except OSError as error:
                logger.warning("no standby can be started, and it is tried again: %s", error)
            await asyncio.sleep(LOOK_SECONDS)

    def stop_watching(self) -> None:
        """Leaves the standby alone: it takes over, or ends with the job."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def end(self) -> None:
        """Kills the standby, which holds nothing while another is the master: the job has ended."""
        self.stop_watching()
        while self._pid is not None and not reaped(self._pid):
            os.kill(self._pid, signal.SIGKILL)
            await asyncio.sleep(POLL_SECONDS)
        self._pid = None


class HungMaster:
    """Watches the acting master for a standby."""

    def __init__(self, directory: Path, lease_seconds: float) -> None:
        self._directory = directory
        self._limit = max(HANGS_SHARE * lease_seconds, HANGS_SECONDS)
        self._clock = RunningClock()
        self._heard = self._asked = self._clock.read()
        self._question: asyncio.Task[bool] | None = None

    async def look(self) -> None:
        """Asks the master now and then, and kills it if it has not answered for too long while this process ran.

        A late answer counts: on a busy machine each one may take seconds.
        """
        now = self._clock.read()
        if self._question is None and now - self._asked >= ASK_SECONDS:
            self._asked = now
            self._question = asyncio.create_task(asyncio.to_thread(self._answers), name="a question to the master")
        elif self._question is not None and self._question.done():
            if self._question.result():
                self._heard = now
            self._question = None
        if self._question is not None and now - self._heard > self._limit:
            self._kill()

    def _answers(self) -> bool:
        """Whether it answers, or takes no requests, as a master that has not begun or has ended."""
        try:
            ask(control_path(self._directory), {"ask": "nothing"}, self._limit)
        except NoMaster as error:
            return not isinstance(error.__cause__, TimeoutError)
        except ControlError:  # it refuses the request: the master lives
            pass
        return True

    def _kill(self) -> None:
        known, holder = read_master(self._directory), holder_of(self._directory / LOCK_FILE)
        if known and holder and known.machine and (known.machine, known.pid) == (machine(), holder.pid):
            logger.error("the master, process %d, does not answer: it is killed", known.pid)
            os.kill(known.pid, signal.SIGKILL)
            self._heard = self._clock.read()
