"""Processes that die with their parent: no vLLM process may outlive the one that started it, however that one ends.

`server` starts vLLM's API server through this file's command, which binds itself and becomes that program; `plugin` binds
vLLM's engine and workers to whoever spawned them. Linux's `PR_SET_PDEATHSIG` (prctl(2)), which an exec preserves, does it
in the kernel, so that it holds for a parent that is killed with SIGKILL.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1

TRACKER_SECONDS = 1.0
"""How long resource trackers may clean up after everything else has been killed."""


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that forked it ends; ends it at once if process `parent` is gone already.

    Does nothing where there is no prctl. Raises `OSError` if the kernel refuses.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        # It died between the fork and the prctl, so no signal will come.
        os._exit(1)


def bind_worker_to_parent() -> None:
    """Binds a process that `multiprocessing` spawned to the process that spawned it; does nothing in a main process, whose parent
    may be a shell that ends long before it should."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)


def bound_command(command: list[str]) -> list[str]:
    """`command`, to be started by this process, so that it dies with it."""
    return [sys.executable, "-P", "-m", "transport.process.parent_death", str(os.getpid()), *command]


def end_group(group: int) -> None:
    """Kills the remaining processes of a process group. Python's resource trackers are killed last: each removes the shared
    memory and semaphores of the killed processes, which would stay in /dev/shm for ever, and then ends by itself."""
    trackers_until = time.monotonic() + TRACKER_SECONDS
    while members := _members(group):
        others = [pid for pid in members if not _is_resource_tracker(pid)]
        for pid in others if time.monotonic() < trackers_until else list(members):
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def stopped_members(group: int) -> list[int]:
    """The processes of a group that a signal has stopped (SIGSTOP) or a debugger holds."""
    return [pid for pid, state in _members(group).items() if state in ("T", "t")]


def _members(group: int) -> dict[int, str]:
    """The living processes of a group, with their states as in /proc."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            state, _parent, its_group = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found[int(entry.name)] = state
    return found


def _is_resource_tracker(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return b"from multiprocessing.resource_tracker import main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
