"""The processes that a test's job has left, found by the directory that their commands name."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from tests.support.polling import wait_until


def processes_of(directory: Path) -> list[int]:
    """Returns the processes that name a directory in their commands, such as the masters and keepers of a job."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(FileNotFoundError, ProcessLookupError):
                if str(directory).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def kill_processes_of(directory: Path) -> None:
    """Kills them, and returns once they have ended."""
    for pid in processes_of(directory):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not processes_of(directory), "the end of all processes")
