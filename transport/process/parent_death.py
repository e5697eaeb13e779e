"""Processes that die with their parent: no vLLM process outlives the one that started it, even one killed with SIGKILL.

`counterpoint/inference/server.py` starts vLLM's API server through this file's command, which binds itself to its parent and
becomes that program, and `counterpoint/tune/runs/host_job.py` its job. `counterpoint/inference/plugin` binds vLLM's engine and
workers to the process that spawned each. The kernel sends the signal (`launch.die_with_parent`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from counterpoint.transport.process.launch import TRACKER_SECONDS, die_with_parent, is_resource_tracker, live_processes


def bind_worker_to_parent() -> None:
    """Binds a process that `multiprocessing` spawned to the process that spawned it.

    Does nothing in a main process, whose parent may be a shell that ends long before it should.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(signal.SIGKILL, parent.pid)


def bound_command(command: list[str]) -> list[str]:
    """Returns `command` wrapped so that, started by this process, it dies with this process."""
    return [sys.executable, "-P", "-m", "counterpoint.transport.process.parent_death", str(os.getpid()), *command]


def end_group(group: int) -> None:
    """Kills the remaining processes of a process group.

    Python's resource trackers are killed last: each removes the shared memory and semaphores of the killed processes, which
    would stay in /dev/shm for ever, and then ends by itself.
    """
    trackers_until = time.monotonic() + TRACKER_SECONDS
    while members := _members(group):
        others = [pid for pid in members if not is_resource_tracker(pid)]
        for pid in others if time.monotonic() < trackers_until else list(members):
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def stopped_members(group: int) -> list[int]:
    """Returns the processes of a group that a signal (SIGSTOP) has stopped or a debugger holds."""
    return [pid for pid, state in _members(group).items() if state in ("T", "t")]


def cpu_seconds(group: int) -> float:
    """Returns the CPU time that the living processes of a group, and those that they have waited for, have used."""
    ticks = 0
    for pid in _members(group):
        with suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _members(group: int) -> dict[int, str]:
    """Returns the living processes of a group, with their states as in /proc."""
    return {pid: state for pid, state, _, its_group in live_processes() if its_group == group}


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL, int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
