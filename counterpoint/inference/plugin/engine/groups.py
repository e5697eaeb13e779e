"""Groups of processes that talk by gloo share one thread that waits for all of their connections.

vLLM makes a dozen groups, also for an engine of one process, and torch gives each of them a thread that wakes a hundred times a
second, whether anyone sends or not: a tenth of the CPU that a small model's engine takes.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed.distributed_c10d import ProcessGroupGloo


def share_a_thread() -> None:
    """Has the groups that are made in this process from now on, and in those forked from it, share a thread for each process.

    Where GLOO_SOCKET_IFNAME names interfaces, each group has its own for each of these, as torch makes them.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    former = ProcessGroupGloo.__init__

    def init(group: Any, store: Any, rank: int, size: int, *options: Any, timeout: timedelta | None = None) -> None:
        if options:
            former(group, store, rank, size, *options)
            return
        shared = ProcessGroupGloo._Options()
        if timeout is not None:
            shared._timeout = timeout
        shared._devices = [_device(os.getpid())]
        former(group, store, rank, size, shared)

    setattr(ProcessGroupGloo, "__init__", init)  # noqa: B010 - mypy knows no other way


@cache
def _device(process: int) -> Any:
    """Returns the device, with a thread, of a process: one that is forked has none of its parent's threads."""
    return ProcessGroupGloo.create_default_device()
