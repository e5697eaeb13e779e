"""Stops a process, as SIGSTOP does, and waits until it has."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from tests.support.polling import wait_until


def freeze(pid: int) -> None:
    """Stops a process. When this returns none of its threads runs: the signal reaches one, which then stops the others."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: set(_states(pid)) == {"T"}, f"process {pid} to stop", details=lambda: str(_states(pid)))


def _states(pid: int) -> list[str]:
    """Returns the state of each thread (proc_pid_stat(5))."""
    states = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return states
