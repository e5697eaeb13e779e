"""The workers of torch training: each checks its node when asked, and runs one node's ranks, round by round.

`rounds` calls the methods marked `@remote`. A call names the incarnation that it means; one about an earlier round than the last
is refused. One thread, the keeper, starts and ends all children: the kernel ends a child with the thread that started it.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from counterpoint.cluster.calls.remote import remote
from counterpoint.cluster.elastic.config import elastic_config
from counterpoint.cluster.elastic.crew import Activity, Report, WorkerId
from counterpoint.cluster.elastic.node_check import CheckProcess
from counterpoint.cluster.elastic.progress import NOTHING, VARIABLE, Totals, read_totals
from counterpoint.cluster.worker import Context, Worker
from counterpoint.transport.process.ranks.node import LOOPBACK, RanksOrder, RanksProcess, interfaces, listen

POLL_SECONDS = 0.05
"""How often the ranks are looked at."""

KILL_SECONDS = 5.0
"""Time that torch's agent has to kill ranks itself, once they should have ended."""

T = TypeVar("T")


class StaleCall(Exception):
    """A call meant another incarnation, or an earlier round."""


class ElasticWorker(Worker):
    """One node of the training."""

    exit_seconds = 300.0
    """How long a node's ranks, having succeeded, wait for those of the others."""
    rank_environment: Mapping[str, str] = MappingProxyType({})
    """Variables of each rank."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.config = elastic_config(context.config)
        self.me = WorkerId(context.worker, context.incarnation)
        self._lock = threading.Lock()
        """Guards the ranks and what is known of them."""
        self._round = 0
        """The highest round that this worker was told of."""
        self._members: tuple[WorkerId, ...] = ()
        """Those of the last round."""
        self._ranks: RanksProcess | None = None
        """Those of the last round, also after they have ended by themselves."""
        self._ending = False
        """Whether the ranks are being ended."""
        self._over = threading.Event()
        """Set once the training is complete, or the job stops."""
        self._last: Report | None = None
        """What this worker did before its own end began. It reports that until it is gone: its end tells why."""
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="keeper")
        self._check = CheckProcess(self.check_command())

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
        report = self._report()
        return report.state + (f": {report.reason}" if report.reason else "")

    # --- calls of the master; `async`, so that no plain method of a subclass holds them up ---

    @remote(idempotent=True)
    async def report(self, incarnation: int, known: str, seconds: float) -> dict[str, Any]:
        """Returns what this worker does, once that differs from the known `Report.state` or the time is over.

        With it comes what its ranks have done in the round (`counterpoint/cluster/elastic/progress.py`).
        """
        self._require(incarnation)
        for _ in range(int(seconds / POLL_SECONDS)):
            if self._report().state != known:
                break
            await asyncio.sleep(POLL_SECONDS)
        ranks = self._ranks
        totals = NOTHING if ranks is None else read_totals(Path(ranks.order.directory))
        said: dict[str, Any] = msgspec.to_builtins(self._report(totals))
        return said

    @remote
    async def do_node_check(self, incarnation: int) -> dict[str, float]:
        """Returns the rates of this node alone. Raises `CheckError`."""
        answer = await self._ask_check(incarnation, {"measure": {}})
        return {str(name): float(rate) for name, rate in answer["rates"].items()}

    @remote
    async def open_pair(self, incarnation: int) -> list[Any]:
        """Returns the address at which this worker waits for the other one of a pair."""
        return [self.host, int((await self._ask_check(incarnation, {"listen": self.host}))["port"])]

    @remote
    async def check_pair(self, incarnation: int, host: str, port: int, rank: int) -> float:
        """Runs a collective with the other one; returns its seconds. Raises `CheckError`."""
        pair = {"host": host, "port": port, "rank": rank, "seconds": self.config.check_seconds}
        return float((await self._ask_check(incarnation, {"pair": pair}, KILL_SECONDS))["seconds"])

    async def _ask_check(self, incarnation: int, question: dict[str, Any], more_seconds: float = 0.0) -> dict[str, Any]:
        self._require(incarnation)
        return await self._keep(lambda: self._check.ask(question, self.config.check_seconds + more_seconds))

    @remote
    async def start_elastic_job(
        self, incarnation: int, number: int, members: list[Any], address: list[Any] | None = None
    ) -> list[Any]:
        """Starts this node's ranks; returns the address of the round's store, which this worker has if none is given.

        `members`: name and incarnation of every worker of the round.
        """
        self._require(incarnation)
        ids = tuple(WorkerId(name, its) for name, its in members)
        if self.me not in ids or number <= self._round:
            raise StaleCall(
                f"{self.me} in round {self._round} was told to start round {number} of {', '.join(map(str, ids))}"
            )
        self._round, self._members = number, ids
        return await self._keep(lambda: self._start_ranks(number, ids, address))

    @remote
    async def stop_round(self, incarnation: int, number: int) -> None:
        """Ends this node's ranks, and returns once they have ended. No earlier round can start any more."""
        self._require(incarnation)
        if number < self._round:
            raise StaleCall(f"{self.me} was told to stop round {number}, and knows of round {self._round}")
        self._round = number
        with suppress(StaleCall):  # a worker that ends does that, too
            await self._keep(self._end_ranks)

    @remote(idempotent=True)
    async def finish(self, incarnation: int) -> None:
        """The training is complete: `start` returns."""
        self._require(incarnation)
        self._over.set()

    def _require(self, incarnation: int) -> None:
        if incarnation != self.me.incarnation:
            raise StaleCall(f"{self.me} was called as incarnation {incarnation}")

    async def _keep(self, work: Callable[[], T]) -> T:
        with self._lock:
            if self._last is not None:
                raise StaleCall(f"{self.me} is about to end")
            kept = self._keeper.submit(work)
        return await asyncio.wrap_future(kept)

    # --- the ranks ---

    def _report(self, totals: Totals = NOTHING) -> Report:
        with self._lock:
            ranks = self._ranks
            if self._last is not None:
                return self._last
            if ranks is None:
                return Report(Activity.IDLE, self._round, self._members)
            reason, code = "", self._code_to_report(ranks)
            if code is None:
                activity = Activity.TRAINING if self._are_up(ranks) else Activity.JOINING
            elif code == 0:
                activity = Activity.SUCCEEDED
            else:
                activity, reason = Activity.FAILED, ranks.failure or ""
        return Report(activity, self._round, self._members, reason, totals)

    def _code_to_report(self, ranks: RanksProcess) -> int | None:
        return ranks.poll()

    def _are_up(self, ranks: RanksProcess) -> bool:
        return ranks.node_rank is not None

    def _start_ranks(self, number: int, ids: tuple[WorkerId, ...], address: list[Any] | None) -> list[Any]:
        """Starts ranks, in the keeper; frees what the check used before, and ends ranks that nobody stopped."""
        self._check.close()
        self._drop_ranks()
        listener = listen(self.host) if address is None else None
        host, port = (listener.getsockname()[:2] if listener is not None else address) or ("", 0)
        directory = tempfile.mkdtemp(prefix="cluster-ranks-")
        order = RanksOrder(
            run_id=f"{self.context.job}-{self.context.role}-{number}",
            host=host,
            port=port,
            nodes=len(ids),
            local_ranks=self.config.local_ranks,
            command=self.config.command(again=number > 1 or any(member.incarnation > 1 for member in ids)),
            directory=directory,
            environment=interfaces(host) | {VARIABLE: directory, **self.rank_environment},
            join_seconds=self.config.join_seconds,
            stop_seconds=self.config.stop_seconds,
            exit_seconds=self.exit_seconds,
        )
        with self._lock:
            self._ranks, self._ending = RanksProcess(order, listener), False
        return [host, port]

    def _end_ranks(self) -> None:
        """Has ranks end in time, in the keeper."""
        with self._lock:
            ranks, self._ending = self._ranks, True
        if ranks is not None:
            ranks.end(self.config.stop_seconds + KILL_SECONDS)
        self._drop_ranks()

    def _drop_ranks(self) -> None:
        with self._lock:
            ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    # --- the beginning and the end ---

    def start(self) -> None:
        """Returns once the master says that the training is complete, or the job stops; meanwhile ranks run as it asks."""
        try:
            self._over.wait()
            self._keeper.submit(self._end_ranks).result()
        finally:
            self._close()

    def stop(self) -> None:
        """Ends a check that runs; `start` ends the ranks."""
        self._check.abort()
        self._over.set()

    def _close(self) -> None:
        """Kills what still runs."""
        last = self._report()
        with self._lock:
            self._last = last
        self._keeper.submit(self._drop_ranks).result()
        self._keeper.submit(self._check.close).result()
        self._keeper.shutdown()
