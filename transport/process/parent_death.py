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

from counterpoint.transport.process.launch import die_with_parent


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


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL, int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
