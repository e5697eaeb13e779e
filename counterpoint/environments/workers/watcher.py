"""Watches the workers of an environment: says which one is blocked and where, and kills those that break a limit.

A blocked loop alone is no reason to kill a worker, which may compute for its rollouts. It is killed once it lets a rollout's
deadline pass and gives no sign of its loop; or when it has too many processes or too much memory.

Memory is the resident size of the worker and all processes below it. A log that is full keeps its end beside it, and is emptied:
a worker that floods it never waits for anybody.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.workers.process import WorkerProcess, blocked_at
from counterpoint.environments.workers.supply import Supply, WorkerPlace
from counterpoint.transport.config import machine_memory
from counterpoint.transport.process.child import size_of
from counterpoint.transport.process.launch import descendants
from counterpoint.transport.process.resident import resident_bytes

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
KEEP_SECONDS = 0.5
GRACE_SECONDS = 5.0
"""How long after a rollout's deadline its worker may be silent, or the rollout go on."""
SILENT_SECONDS = 3.0
"""A worker whose loop was silent for so long, with such a rollout, does not react."""
BLOCKED_SECONDS = 1.0
"""A loop that is silent for so long is named in the log, and gets no further rollout if another worker has room."""
STACK_TICKS = 20
"""How long a worker may take to write its stacks, which needs a moment of the CPU."""
START_SECONDS = 240.0
SOFT_SHARE = 0.75
"""A share of the memory limit: a worker above it gets no further session, and is started anew when its last one ends."""

LOG_BYTES, KEPT_BYTES = 16 * 2**20, 2**20
"""Size at which a worker's log is emptied, and how much of its end is kept."""
STACK_BYTES = 2**20


class Watcher:
    """Looks at the workers of a supply. `drain` begins the end of a worker that gets no further session."""

    def __init__(self, config: EnvironmentConfig, supply: Supply, drain: Callable[[WorkerPlace, str], None]) -> None:
        self._config = config
        self._supply = supply
        self._drain = drain
        self._memory_limit = config.worker_memory_bytes or machine_memory() // 2 // max(1, config.workers)
        self._lag = 0.0

    def start(self) -> None:
        """Begins to watch."""
        self._loop = asyncio.get_running_loop()
        self._supply.spawn(self._watch())
        self._supply.spawn(self._keep())

    def heard(self, worker: WorkerPlace) -> None:
        """Notes that a message of the worker arrived, which only a loop that runs sends. Beats may be queued behind others."""
        worker.silent_ticks, worker.blamed = 0, False

    def beat(self, worker: WorkerPlace, lag: float) -> None:
        """Notes that a worker's loop was late by `lag` seconds."""
        self._lag = max(self._lag, lag)

    def take_lag(self) -> float:
        """Returns the largest lag since the last call, in seconds."""
        lag, self._lag = self._lag, 0.0
        return lag

    def is_silent(self, worker: WorkerPlace) -> bool:
        """Whether its loop seems to be blocked."""
        return worker.silent_ticks * TICK_SECONDS >= BLOCKED_SECONDS

    async def _watch(self) -> None:
        due = self._loop.time()
        while True:
            due += TICK_SECONDS
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            if self._loop.time() - due >= TICK_SECONDS:  # this loop was blocked, and has the workers' beats to read
                due = self._loop.time()
                continue
            for worker in self._supply.workers:
                if worker.process is not None:
                    self._look_at(worker)

    async def _keep(self) -> None:
        """Looks after memory, processes and files, in a thread."""
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            kept = [(worker, worker.process) for worker in self._supply.workers if worker.process is not None]
            usages = await self._loop.run_in_executor(
                self._supply.threads, look_at_all, [process for _, process in kept]
            )
            for (worker, process), usage in zip(kept, usages, strict=True):
                if worker.process is process and not worker.killed:
                    self._limit(worker, usage)

    def _look_at(self, worker: WorkerPlace) -> None:
        now = self._loop.time()
        worker.messages = 0
        if not worker.ready:
            if now - worker.since > START_SECONDS:
                worker.kill(f"was killed: it was not ready within {START_SECONDS:g} s")
            return
        worker.silent_ticks += 1
        silent = worker.silent_ticks * TICK_SECONDS
        if self.is_silent(worker):
            self._lag = max(self._lag, silent)
            if not worker.blamed:
                worker.blamed = True
                self._supply.spawn(self._blame(worker))
        overdue = [session.deadline for session in worker.sessions.values() if now > session.deadline + GRACE_SECONDS]
        if not overdue or worker.killed:
            return
        if silent >= SILENT_SECONDS:
            worker.killed = "was killed"  # and why, once its stack is read
            self._supply.spawn(self._kill_blocked(worker, silent))
        elif silent < BLOCKED_SECONDS:
            self._is_ignored(worker, len(overdue))

    def _is_ignored(self, worker: WorkerPlace, overdue: int) -> None:
        """Handles rollouts that go on although they were cancelled, on a loop that runs."""
        if not worker.draining:
            logger.warning("%s: %s has a rollout that ignores its cancellation", self._supply.where, worker)
            self._drain(worker, "a rollout ignored its cancellation")
        if overdue == len(worker.sessions):
            worker.kill(f"was killed: {worker.draining}")

    def _limit(self, worker: WorkerPlace, usage: _Usage) -> None:
        most = self._config.worker_processes
        if usage.processes > 1 + most:
            worker.kill(f"was killed: it had {usage.processes - 1} processes; worker_processes = {most}")
        elif usage.memory > self._memory_limit:
            used, allowed = usage.memory >> 20, self._memory_limit >> 20
            worker.kill(f"was killed: it used {used} MiB of memory; worker_memory_bytes allows {allowed} MiB")
        elif usage.memory > SOFT_SHARE * self._memory_limit and worker.ready and not worker.draining:
            logger.warning(
                "%s: %s uses %d MiB of %d: it is started anew when its rollouts have ended",
                self._supply.where, worker, usage.memory >> 20, self._memory_limit >> 20,
            )  # fmt: skip
            self._drain(worker, "it used most of its memory")

    async def _blame(self, worker: WorkerPlace) -> str:
        """Logs where a worker's loop is blocked, and returns that; empty if it is not in the environment's code."""
        process = worker.process
        if process is None:
            return ""
        place = await self._stack_of(process)
        if place:
            logger.warning("%s: the event loop of %s is blocked in %s", self._supply.where, worker, place)
        else:  # it waits for the CPU, or begins to
            logger.info("%s: %s is silent, and no code of the environment runs there", self._supply.where, worker)
        return place

    async def _stack_of(self, process: WorkerProcess) -> str:
        """Asks for a worker's stacks, and returns the place; empty if it does not write any for a while."""
        size = await self._loop.run_in_executor(self._supply.threads, size_of, process.stack_file)
        process.ask_for_stack()
        for _ in range(STACK_TICKS):
            await asyncio.sleep(TICK_SECONDS)
            if await self._loop.run_in_executor(self._supply.threads, size_of, process.stack_file) != size:
                break
        return await self._loop.run_in_executor(self._supply.threads, blocked_at, process.stack_file)

    async def _kill_blocked(self, worker: WorkerPlace, silent: float) -> None:
        process = worker.process
        place = await self._blame(worker)
        if worker.process is process:
            worker.killed = ""
            where = f" in {place}" if place else ""
            worker.kill(f"was killed: its event loop was blocked{where}; for {silent:.0f} s, past a rollout's deadline")


@dataclass(frozen=True, slots=True)
class _Usage:
    """What a worker uses, its guardian left out."""

    processes: int
    memory: int
    """The memory in use, in bytes."""


def look_at_all(processes: Sequence[WorkerProcess]) -> list[_Usage]:
    """Measures workers, and keeps their files small."""
    return [_look_at(process) for process in processes]


def _look_at(process: WorkerProcess) -> _Usage:
    with suppress(OSError):
        _empty_if_full(process.log_file)
        if process.stack_file.stat().st_size > STACK_BYTES:
            os.truncate(process.stack_file, 0)
    pids = _below(process.guardian)
    return _Usage(len(pids), sum(map(_resident, pids)))


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
    with suppress(OSError, IndexError):
        return resident_bytes(pid)
    return 0
