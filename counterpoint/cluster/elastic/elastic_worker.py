"""The workers of torch training: each checks its node when asked, and runs one node's ranks, round by round.

`elastic_master` calls the methods marked `@remote`. Every call names the incarnation that it means; a call about an earlier
round than the last is refused. The thread of `start` owns the child that runs the ranks, and another thread the child that checks
the node, since the kernel ends a child with the thread that started it.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from counterpoint.cluster.calls.remote import remote
from counterpoint.cluster.elastic.config import elastic_config
from counterpoint.cluster.elastic.events import HAS_RANKS, Activity, Report, WorkerId
from counterpoint.cluster.elastic.node_check import CheckProcess
from counterpoint.cluster.elastic.progress import VARIABLE, Totals, read_totals
from counterpoint.cluster.worker import Context, Worker
from counterpoint.transport.process.ranks.node import LOOPBACK, RanksOrder, RanksProcess, interfaces, listen

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""How often the ranks are looked at, and changes are passed on."""

KILL_SECONDS = 5.0
"""Time that torch's agent has to kill ranks itself, once they should have ended."""

T = TypeVar("T")


class StaleCall(Exception):
    """A call meant another incarnation, or an earlier round."""


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Start the ranks of a round."""

    order: RanksOrder
    listener: socket.socket | None


@dataclass(frozen=True, slots=True)
class _Stop:
    """Has the ranks end."""


class ElasticWorker(Worker):
    """One node of the training."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.config = elastic_config(context.config)
        self.me = WorkerId(context.worker, context.incarnation)
        self._lock = threading.Lock()
        """Guards the report, its version, the listener and the directory of progress."""
        self._report = Report(Activity.IDLE)
        self._version = 0
        self._round = 0
        """The highest round that this worker was told of."""
        self._listener: socket.socket | None = None
        self._progress_directory: str | None = None
        """The directory where the ranks of the last round say what they have done."""
        self._commands: queue.SimpleQueue[StartOrder | _Stop] = queue.SimpleQueue()
        self._finished = threading.Event()
        self._check_thread = ThreadPoolExecutor(1, thread_name_prefix="node-check")
        self._check = CheckProcess(self.check_command())
        self._ranks: RanksProcess | None = None
        self._ending_until: float | None = None

    def check_command(self) -> Sequence[str]:
        """Returns the command that checks this node, which answers as `node_check` does; empty for that one."""
        return ()

    @property
    def host(self) -> str:
        """The address at which the stores listen."""
        host = self.config.host.replace("{node}", self.context.node)
        if "{address}" not in host:
            return host
        calls = {member.worker: member.address for member in self.context.get_nodes_by_role(self.context.role)}
        scheme, _, place = calls.get(self.context.worker, "").partition("://")
        return host.replace("{address}", place.rpartition(":")[0].strip("[]") if scheme == "tcp" else LOOPBACK)

    def status(self) -> str:
        """Says what the ranks do."""
        report = self._report
        return f"{report.activity.value.lower()}, round {report.round}" + (
            f": {report.reason}" if report.reason else ""
        )

    # --- calls of the master; `async`, so that no plain method of a subclass holds them up ---

    @remote(idempotent=True)
    async def report(self, incarnation: int, known: int, seconds: float) -> dict[str, Any]:
        """Returns what this worker does, and the version of that, once it differs from the known one or the time is over.

        With it comes what its ranks have done in the round (`counterpoint/cluster/elastic/progress.py`).
        """
        self._require(incarnation)
        for _ in range(int(seconds / POLL_SECONDS)):
            if self._version != known:
                break
            await asyncio.sleep(POLL_SECONDS)
        with self._lock:
            report, version = self._report, self._version
            directory = self._progress_directory
        totals = Totals() if directory is None else read_totals(Path(directory))
        return {
            "version": version,
            "activity": report.activity.value,
            "round": report.round,
            "members": [[*member] for member in report.members],
            "reason": report.reason,
            "done": totals.done,
            "idle_seconds": totals.idle_seconds,
            "ranks": totals.ranks,
        }

    @remote
    async def do_node_check(self, incarnation: int) -> dict[str, float]:
        """Returns the rates of this node alone. Raises `CheckError`."""
        self._require(incarnation)
        answer = await self._in_check_thread(lambda: self._check.ask({"measure": {}}, self.config.check_seconds))
        return {str(name): float(rate) for name, rate in answer["rates"].items()}

    @remote
    async def open_pair(self, incarnation: int) -> list[Any]:
        """Returns the address at which this worker waits for the other one of a pair."""
        self._require(incarnation)
        question = {"listen": self.host}
        answer = await self._in_check_thread(lambda: self._check.ask(question, self.config.check_seconds))
        return [self.host, int(answer["port"])]

    @remote
    async def check_pair(self, incarnation: int, host: str, port: int, rank: int) -> float:
        """Runs a collective with the other one; returns its seconds. Raises `CheckError`."""
        self._require(incarnation)
        seconds = self.config.check_seconds
        question = {"pair": {"host": host, "port": port, "rank": rank, "seconds": seconds}}
        answer = await self._in_check_thread(lambda: self._check.ask(question, seconds + KILL_SECONDS))
        return float(answer["seconds"])

    @remote
    async def end_check(self, incarnation: int) -> None:
        """Frees what the check used."""
        self._require(incarnation)
        await self._in_check_thread(self._check.close)

    @remote
    async def open_round(self, incarnation: int, number: int) -> list[Any]:
        """Returns the address at which this worker will have the round's store."""
        self._require(incarnation, number)
        with self._lock:
            if self._listener is not None:
                self._listener.close()
            self._listener = listen(self.host)
            return [*self._listener.getsockname()[:2]]

    @remote
    async def start_elastic_job(self, incarnation: int, number: int, members: list[Any], host: str, port: int) -> None:
        """Starts this node's ranks. `members`: name and incarnation of every worker of the round."""
        self._require(incarnation)
        ids = tuple(WorkerId(name, its) for name, its in members)
        if self.me not in ids or number <= self._round:
            raise StaleCall(
                f"{self.me} in round {self._round} was told to start round {number} of {', '.join(map(str, ids))}"
            )
        self._round = number
        directory = tempfile.mkdtemp(prefix="cluster-ranks-")
        order = RanksOrder(
            run_id=f"{self.context.job}-{self.context.role}-{number}",
            host=host,
            port=port,
            nodes=len(ids),
            local_ranks=self.config.local_ranks,
            command=self.config.command(again=number > 1 or any(member.incarnation > 1 for member in ids)),
            directory=directory,
            environment=interfaces(host) | {VARIABLE: directory},
            join_seconds=self.config.join_seconds,
            stop_seconds=self.config.stop_seconds,
        )
        with self._lock:
            listener, self._listener = self._listener, None
            self._progress_directory = directory
            self._set(Report(Activity.JOINING, number, ids))
        if listener is not None and listener.getsockname()[1] != port:
            listener.close()
            listener = None
        self._commands.put(StartOrder(order, listener))

    @remote
    async def stop_round(self, incarnation: int, number: int) -> None:
        """Ends this node's ranks; the report is IDLE once they have ended. No earlier round can start any more."""
        self._require(incarnation, number)
        self._round = number
        with self._lock:
            if self._report.activity not in HAS_RANKS:
                self._set(Report(Activity.IDLE, number))
                return
        self._commands.put(_Stop())

    @remote(idempotent=True)
    async def finish(self, incarnation: int) -> None:
        """The training is complete: `start` returns."""
        self._require(incarnation)
        self._finished.set()

    def _require(self, incarnation: int, number: int | None = None) -> None:
        if incarnation != self.me.incarnation:
            raise StaleCall(f"{self.me} was called as incarnation {incarnation}")
        if number is not None and number < self._round:
            raise StaleCall(f"{self.me} was called for round {number}, and knows of round {self._round}")

    async def _in_check_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._check_thread, work)

    def _set(self, report: Report) -> None:
        """Changes the report; call it with the lock."""
        self._report = report
        self._version += 1

    def stop(self) -> None:
        """Ends a check that runs; `start` ends the ranks."""
        self._check.abort()

    # --- the thread of `start` ---

    def start(self) -> None:
        """Runs ranks as the master asks, until it says that the training is complete, or the job stops."""
        try:
            while not self._finished.is_set() and not self.context.stop.is_set():
                self._step()
            if self._ranks is not None:
                self._end_ranks()
                while self._ranks is not None:
                    self._step()
        finally:
            self._close()

    def _step(self) -> None:
        try:
            command = self._commands.get(timeout=POLL_SECONDS)
        except queue.Empty:
            pass
        else:
            if isinstance(command, StartOrder):
                self._start_ranks(command)
            else:
                self._end_ranks()
        if self._ranks is not None:
            self._look_at(self._ranks)

    def _start_ranks(self, command: StartOrder) -> None:
        if self._ranks is not None:  # of an earlier round, which nobody stopped
            self._ranks.close()
        self._ending_until = None
        try:
            self._ranks = RanksProcess(command.order, command.listener)
        except OSError as error:
            self._ranks = None
            self._change(Activity.FAILED, f"cannot start torch's agent: {error}")

    def _end_ranks(self) -> None:
        if self._ranks is None:
            self._change(Activity.IDLE)
        elif self._ending_until is None:
            self._ranks.terminate()
            self._ending_until = time.monotonic() + self.config.stop_seconds + KILL_SECONDS

    def _look_at(self, ranks: RanksProcess) -> None:
        code = ranks.poll()
        if code is not None:
            ranks.close()
            was_ending, self._ranks, self._ending_until = self._ending_until is not None, None, None
            if was_ending:
                self._change(Activity.IDLE)
            else:
                self._have_ended(ranks, code)
        elif self._ending_until is not None:
            if time.monotonic() > self._ending_until:
                logger.warning("the ranks did not end in time and are killed")
                ranks.kill()
        elif self._report.activity is Activity.JOINING and self._are_up(ranks):
            self._change(Activity.TRAINING)

    def _are_up(self, ranks: RanksProcess) -> bool:
        return ranks.joined

    def _have_ended(self, ranks: RanksProcess, code: int) -> None:
        """The ranks have ended by themselves."""
        if code == 0 and ranks.succeeded:
            self._change(Activity.SUCCEEDED)
        else:
            self._change(Activity.FAILED, ranks.failure or f"torch's agent ended with exit code {code}")

    def _change(self, activity: Activity, reason: str = "") -> None:
        with self._lock:
            number, members = self._report.round, self._report.members
            self._set(Report(activity, self._round if activity is Activity.IDLE else number, members, reason))

    def _close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        self._check_thread.submit(self._check.close).result()
        self._check_thread.shutdown()
        with self._lock:
            if self._listener is not None:
                self._listener.close()
                self._listener = None
