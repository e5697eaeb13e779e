"""The supply of an environment's workers: starts each, and starts it again after a pause that grows when it ended.

`pool.py` gives them work, `watcher.py` decides which ones have to be killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from counterpoint.environments.base import EnvironmentContext, WorkerError
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.workers.boot import Boot
from counterpoint.environments.workers.process import WorkerProcess, in_words, last_output
from counterpoint.environments.workers.session import RemoteSession
from counterpoint.transport.process.launch import live_processes

logger = logging.getLogger(__name__)

PAUSE_SECONDS = (0.1, 30.0)
"""Pause before a worker is started again: the first time, and at most."""
SOON_SECONDS = 5.0
"""Rollouts wait for a worker that is started again within this time, and fail otherwise."""
HEALTHY_SECONDS = 60.0
"""A worker that lived for so long is started again without a longer pause."""
FAILED_STARTS = 3
"""Failed starts in a row, of all workers, after which rollouts fail at once, until one starts."""
LATE_MESSAGES_SECONDS = 0.05
"""What a worker sent before its end may arrive so long after it."""


@dataclass(slots=True)
class WorkerPlace:
    """One place for a worker, and the process that has it now."""

    index: int
    process: WorkerProcess | None = None
    token: str = ""
    peer: bytes | None = None
    """Its routing id, once it has said who it is."""
    ready: bool = False
    draining: str = ""
    """Why it gets no further session."""
    killed: str = ""
    """Why it was killed, or could not start."""
    sessions: dict[int, RemoteSession] = field(default_factory=dict)
    since: float = 0.0
    """The time when it was started, on the loop's clock, in seconds."""
    silent_ticks: int = 0
    messages: int = 0
    """Messages in this tick, calls of the model left out: those are bounded by the sessions."""
    blamed: bool = False
    """The log has named what blocks it now."""
    deaths: int = 0
    """Deaths in a row, without a rollout that was completed in between."""
    restart: asyncio.TimerHandle | None = None

    def __str__(self) -> str:
        return f"its worker {self.index}"

    def kill(self, reason: str) -> None:
        """Kills it and everything below it, once."""
        if self.process is not None and not self.killed:
            self.killed = reason
            self.process.kill()


class Supply:
    """The workers. `lost` is called when one has ended, with its sessions' error; `failed` when none is to be expected soon."""

    def __init__(
        self,
        config: EnvironmentConfig,
        lost: Callable[[WorkerPlace, WorkerError], None],
        failed: Callable[[WorkerError], None],
    ) -> None:
        self.workers = [WorkerPlace(index) for index in range(config.workers)]
        self.where = f"environment {config.name!r}"
        self.threads = ThreadPoolExecutor(1, thread_name_prefix=f"workers-{config.name}")
        """Thread that reads the disk and /proc."""
        self.failure = ""
        """Why no worker starts."""
        self.changed = asyncio.Event()
        """A worker has become ready, or has ended, or none starts."""
        self.restarts = 0
        self._config = config
        self._lost = lost
        self._failed = failed
        self._failed_starts = 0
        self._last_death = ""
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, context: EnvironmentContext, address: str) -> None:
        """Starts all workers, which connect to the address."""
        self._given, self._address = context, address
        self._loop = asyncio.get_running_loop()
        for worker in self.workers:
            self._launch(worker)

    def is_ready(self, worker: WorkerPlace) -> None:
        """Counts a worker as started."""
        worker.ready = True
        self._failed_starts, self.failure = 0, ""
        self.changed.set()

    def cannot_start(self, worker: WorkerPlace, error: str) -> None:
        """Notes a worker's own word that it cannot load or start the environment; it then ends."""
        worker.killed = f"cannot start: {error}"
        if not any(each.ready for each in self.workers):
            self._give_up(error)

    def all_down(self) -> str:
        """Returns why no worker is there or about to be; empty if one is."""
        now = self._loop.time()
        for worker in self.workers:
            if worker.process is not None or (
                worker.restart is not None and worker.restart.when() - now < SOON_SECONDS
            ):
                return ""
        return self._last_death

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs work in the background until `close`."""
        task = self._loop.create_task(work, name=f"workers of {self._config.name}")
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def stop(self) -> None:
        """Starts no worker any more."""
        self._closing = True
        for worker in self.workers:
            if worker.restart is not None:
                worker.restart.cancel()

    async def all_ended(self, seconds: float) -> bool:
        """Waits for the end of all processes; returns whether they ended in time."""
        try:
            async with asyncio.timeout(seconds):
                while any(worker.process is not None for worker in self.workers):
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Ends tasks and threads."""
        for task in self._tasks:
            task.cancel()
        self.threads.shutdown()

    def _launch(self, worker: WorkerPlace) -> None:
        worker.restart = None
        if self._closing:
            return
        worker.token, worker.since = secrets.token_hex(16), self._loop.time()
        worker.peer, worker.ready, worker.draining, worker.killed = None, False, "", ""
        worker.silent_ticks, worker.blamed = 0, False
        place = self._given.directory / f"worker-{worker.index}"
        boot = Boot(
            address=self._address,
            token=worker.token,
            environment=self._config.model_copy(update={"workers": 0}).model_dump(mode="json"),
            directory=str(place),
            model=str(self._given.model),
            seed=self._given.seed,
            stack_file=f"{place}.stack",
            most_user_processes=self._most_user_processes(),
        )
        log_file = place.with_name(f"{place.name}.log")
        try:
            worker.process = WorkerProcess(boot, log_file, lambda code: self.spawn(self._ended(worker, code)))
        except OSError as error:
            self._start_failed(worker, f"cannot be started: {error}")
            self._relaunch_later(worker)

    def _most_user_processes(self) -> int:
        if os.getuid() == 0:
            return 0
        return 4 * len(live_processes()) + 64 * self._config.worker_processes + 4096  # threads count, too

    async def _ended(self, worker: WorkerPlace, code: int) -> None:
        """Fails the sessions of a worker whose processes are all gone, and starts it again."""
        process = worker.process
        assert process is not None
        await asyncio.sleep(LATE_MESSAGES_SECONDS)
        output = await self._loop.run_in_executor(self.threads, last_output, process.log_file, process.log_from)
        what = f"{worker.killed or f'died: {in_words(code)}'}; last output: {output}"
        was_ready, sessions = worker.ready, len(worker.sessions)
        worker.process, worker.ready = None, False
        self._lost(worker, WorkerError(f"{worker} {what}"))
        worker.sessions, worker.peer = {}, None
        self.changed.set()
        if self._closing:
            return
        if not worker.draining or worker.killed:
            logger.error("%s: %s %s; %d of its rollouts fail with it", self.where, worker, what, sessions)
        self._count_death(worker, was_ready, what)
        self._relaunch_later(worker)
        if reason := self.all_down():
            self._failed(WorkerError(reason))

    def _count_death(self, worker: WorkerPlace, was_ready: bool, what: str) -> None:
        self._last_death = f"{worker} {what}"
        if not was_ready:
            self._start_failed(worker, what)
            return
        self.restarts += 1
        healthy = self._loop.time() - worker.since >= HEALTHY_SECONDS or bool(worker.draining)
        worker.deaths = 1 if healthy else worker.deaths + 1

    def _start_failed(self, worker: WorkerPlace, what: str) -> None:
        worker.deaths += 1
        self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS and not self.failure and not any(each.ready for each in self.workers):
            self._give_up(f"{self.where}: its workers do not start: {what}")

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        logger.error("%s; its rollouts fail until a worker starts", reason)
        self._failed(WorkerError(reason))
        self.changed.set()

    def _relaunch_later(self, worker: WorkerPlace) -> None:
        if not self._closing:
            first, longest = PAUSE_SECONDS
            pause = min(longest, first * 2.0 ** min(worker.deaths, 20))
            worker.restart = self._loop.call_later(pause, self._launch, worker)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("%s: %s failed", self.where, task.get_name(), exc_info=error)
