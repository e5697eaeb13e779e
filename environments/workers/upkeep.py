"""What is looked at for each worker twice a second, in a thread: its memory, its processes, its log and its stack file.

Memory is the resident size of the worker and all processes below it. A log that is full keeps its end beside it, and is emptied:
a worker that floods it never waits for anybody.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from environments.workers.process import WorkerProcess
from transport.process.launch import descendants

LOG_BYTES = 16 * 2**20
KEPT_BYTES = 2**20
STACK_BYTES = 2**20

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a worker uses, its guardian left out."""

    processes: int
    memory: int
    """Bytes."""


def look_at_all(processes: Sequence[WorkerProcess]) -> list[Usage]:
    """Measures workers, and keeps their files small."""
    return [_look_at(process) for process in processes]


def _look_at(process: WorkerProcess) -> Usage:
    with suppress(OSError):
        _empty_if_full(process.log_file)
        if process.stack_file.stat().st_size > STACK_BYTES:
            os.truncate(process.stack_file, 0)
    pids = _below(process.guardian)
    return Usage(len(pids), sum(map(_resident, pids)))


def _empty_if_full(log_file: Path) -> None:
    with log_file.open("rb+") as file:
        size = os.fstat(file.fileno()).st_size
        if size < LOG_BYTES:
            return
        file.seek(size - KEPT_BYTES)
        log_file.with_name(f"{log_file.name}.1").write_bytes(file.read(KEPT_BYTES))
        file.truncate(0)  # the worker appends, so its next line begins the file


def _below(root: int) -> list[int]:
    """Returns the processes below one."""
    if not os.path.exists(f"/proc/{root}/task/{root}/children"):
        return descendants(root)  # a kernel without CONFIG_PROC_CHILDREN: all processes are read
    found: list[int] = []
    frontier = [root]
    while frontier:
        children = _children(frontier.pop())
        found += children
        frontier += children
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def _resident(pid: int) -> int:
    with suppress(OSError, IndexError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0
