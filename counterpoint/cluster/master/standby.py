"""Starts masters as processes of their own, which nobody is the parent of for long; and keeps one that waits to take over."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path

from counterpoint.cluster.job_files import MASTER_LOG
from counterpoint.cluster.master.faults import VARIABLE
from counterpoint.transport.process.child import spawn

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Seconds between two looks at whether the standby lives."""

END_SECONDS = 10.0
"""Longest time for a standby to end when it is asked to; then it is killed."""

POLL_SECONDS = 0.02


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
        """Ends the standby: the job has ended."""
        self.stop_watching()
        if self._pid is None:
            return
        began, number = time.monotonic(), signal.SIGTERM
        while not reaped(self._pid):
            if time.monotonic() - began > END_SECONDS:
                number = signal.SIGKILL
            os.kill(self._pid, number)
            await asyncio.sleep(POLL_SECONDS)
        self._pid = None
