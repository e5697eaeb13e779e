"""Processes that die with their parent, even one killed with SIGKILL, and have no guardian.

`counterpoint/tune/runs/host_job.py` starts its job through this file's command, which binds itself to its parent and becomes that
program. `counterpoint/inference/plugin` binds vLLM's engine and workers to the process that spawned each. The kernel sends the
signal (`launch.die_with_parent`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from counterpoint.transport.process.launch import descendants, die_with_parent


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


def stopped_below(root: int) -> list[int]:
    """Returns the processes from `root` downwards that a signal (SIGSTOP) has stopped or a debugger holds."""
    return [pid for pid, fields in _fields_below(root) if fields[0] in ("T", "t")]


def cpu_seconds(root: int) -> float:
    """Returns the CPU time that `root`, the living processes below it, and those that they have waited for, have used."""
    return sum(sum(map(int, fields[11:15])) for _, fields in _fields_below(root)) / os.sysconf("SC_CLK_TCK")


def _fields_below(root: int) -> Iterator[tuple[int, list[str]]]:
    """Yields the living processes from `root` downwards, with the fields of proc_pid_stat(5) from the state on."""
    for pid in (root, *descendants(root)):
        with suppress(OSError):  # it has just ended
            yield pid, Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL, int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
