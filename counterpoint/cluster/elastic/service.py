"""Ranks that are a service of a job, which other roles need to become ready: `ServiceMaster` and `ServiceWorker`.

They are ElasticMaster and ElasticWorker for a role with `start = "worker"` whose ranks speak systemd's protocol, as commands
do (`transport/process/notify.py`; rank 0 also sends `MAINPID` and `EXIT_STATUS`). What such a role means to the job is what one
process with these ranks would mean to it:

- The role is ready, and others may start after it, once rank 0 is: `ServiceMaster.check_child` returns then.
- A worker lives as long as its ranks. It ends with rank 0's exit code, or with 1 if a rank died. So the role's budget, its pauses
  and the final codes hold for the ranks, and status and log name the worker. PrimeMaster creates it again; the ServiceMaster ends
  the ranks of the other nodes, checks the nodes, and starts the next round, with `restart_arguments`, on all.
- Rank 0's silence, and its being late, end all ranks of its node.
- A request to stop goes to rank 0 alone, which ends its step and then the other ranks; torch's agent would end all at once.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec

from counterpoint.cluster.elastic.elastic_master import ElasticMaster
from counterpoint.cluster.elastic.elastic_worker import POLL_SECONDS, ElasticWorker
from counterpoint.cluster.elastic.rounds import RoundsStage
from counterpoint.cluster.worker import Context, Member
from counterpoint.transport.process.notify import NotifySocket
from counterpoint.transport.process.ranks.node import RanksOrder, RanksProcess
from counterpoint.transport.process.start_time import LONGEST_STARTS

TERMINATED = 128 + signal.SIGTERM
"""Rank 0's exit code after a SIGTERM: ours, or that of torch's agent, which ends all ranks when one has died."""

EXIT_SECONDS = 3.0
"""A node whose ranks have succeeded waits this long for the others, so that it does not take the store from them. Rank 0 may end
with another code than 0, and is not heard of then."""

NO_TORCH = 2
"""Exit code without torch, which is final."""


class RankZero:
    """Listens to what rank 0 of one round says of itself, if that is one of this node's ranks.

    There is one for each round, so that nothing of an earlier round is heard. torch's agent tells only whether ranks succeeded.
    """

    def __init__(self, silence_seconds: float | None) -> None:
        self._socket = NotifySocket()
        self._silence_seconds = silence_seconds
        self._began = self._heard = time.monotonic()
        self.pid: int | None = None
        self.is_ready = False
        self.failure = ""
        """Why the ranks are about to end, as the first of them said."""
        self._extended_until = -math.inf
        self.code: int | None = None
        """Its exit code; that of another rank if this means the same on every rank."""
        self._told = False

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which the ranks find this."""
        limit = self._silence_seconds
        watchdog = {} if limit is None else {"WATCHDOG_USEC": str(int(limit * 1e6))}
        return {"NOTIFY_SOCKET": self._socket.address} | watchdog

    def hear(self) -> None:
        """Takes what was said."""
        while (message := self._socket.receive()) is not None:
            if message.get("MAINPID", "").isdecimal():
                self.pid = int(message["MAINPID"])
            if message.get("EXIT_STATUS", "").isdecimal():
                self.code = int(message["EXIT_STATUS"])
            if message.get("EXTEND_TIMEOUT_USEC", "").isdecimal():
                self._extended_until = time.monotonic() + int(message["EXTEND_TIMEOUT_USEC"][:18]) / 1e6
            self.failure = self.failure or message.get("X_FAILURE", "")
            self.is_ready |= message.get("READY") == "1"
            if self.is_ready:
                self._heard = time.monotonic()

    def trouble(self, ready_seconds: float) -> str:
        """Returns what is wrong with it, for a person; empty if nothing is. Call `hear` before."""
        now = time.monotonic()
        if self.code is not None:
            return ""  # it ends
        until = max(
            self._began + ready_seconds, min(self._extended_until, self._began + LONGEST_STARTS * ready_seconds)
        )
        if not self.is_ready and now > until:
            return f"rank 0 was not ready within {ready_seconds:g} s"
        if self.is_ready and self._silence_seconds is not None and now - self._heard > self._silence_seconds:
            return f"rank 0 was silent for {self._silence_seconds:g} s"
        return ""

    def ask_to_end(self) -> bool:
        """Sends it SIGTERM, once; returns False if it is not there to be asked."""
        if self.pid is None:
            return False
        if not self._told:
            self._told = True
            with suppress(ProcessLookupError):  # it has died, and torch's agent will notice
                os.kill(self.pid, signal.SIGTERM)
        return True

    def close(self) -> None:
        """Frees the socket."""
        self._socket.close()


class RanksFailed(Exception):
    """A rank died, or rank 0 did not do what it should have done in time."""


class ServiceMaster(ElasticMaster):
    """Manages the ServiceWorkers of one role. Its `start` runs from the beginning, and `check_child` beside it."""

    def check_child(self, children: Sequence[Member]) -> None:
        """Waits until rank 0 is ready; the role's `ready_timeout_seconds` bounds that."""
        while self.rounds.stage not in (RoundsStage.TRAINING, RoundsStage.ENDED):
            if self.context.stop.wait(POLL_SECONDS):
                return


class ServiceWorker(ElasticWorker):
    """One node of the service."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._rank_zero: RankZero | None = None

    def self_check(self) -> None:
        """Ends the worker for good if its node has no torch."""
        if find_spec("torch") is None:
            print("the ranks need torch; install the extra `cpu`, `gpu` or `train`", file=sys.stderr)  # noqa: T201
            raise SystemExit(NO_TORCH)

    def start(self) -> None:
        """Runs ranks as the master asks, until they end or the job stops; ends with rank 0's exit code."""
        try:
            while not self._over.wait(POLL_SECONDS):
                self._look()
            code = self._end_in_order()
        finally:
            self._close()
        if code:
            raise SystemExit(code)

    def _start_ranks(self, order: RanksOrder, listener: socket.socket | None) -> None:
        self._drop_rank_zero()
        rank_zero = RankZero(self.config.silence_seconds)
        environment = {**order.environment, **rank_zero.environment}
        super()._start_ranks(replace(order, environment=environment, exit_seconds=EXIT_SECONDS), listener)
        with self._lock:
            self._rank_zero = rank_zero

    def _are_up(self, ranks: RanksProcess) -> bool:
        if not ranks.joined or self._rank_zero is None:
            return False
        self._rank_zero.hear()
        return ranks.node_rank != 0 or self._rank_zero.is_ready

    def _look(self) -> None:
        """Ends this worker as its ranks have ended, unless it was asked to end them, or if rank 0 is late or silent."""
        with self._lock:
            ranks, rank_zero = self._ranks, self._rank_zero
            if ranks is None or rank_zero is None or self._ending:
                return
            code = ranks.poll()
            rank_zero.hear()
        if code is None:
            if ranks.node_rank == 0 and (trouble := rank_zero.trouble(self.config.ready_seconds)):
                raise RanksFailed(f"{trouble}; all ranks are killed")  # `_close` does that
            return
        said = 0 if rank_zero.code is None and code == 0 and ranks.succeeded else rank_zero.code
        why = rank_zero.failure
        if said is None or said == TERMINATED:
            how = ranks.failure or f"torch's agent ended with exit code {code}"
            raise RanksFailed(f"{how}: {why}" if why else how)
        raise SystemExit(said) from (RanksFailed(why) if why else None)

    def _end_in_order(self) -> int:
        """Has rank 0 end the ranks, and waits for that; returns the exit code, which is rank 0's on its node, else 0."""
        with self._lock:
            ranks, rank_zero, by_master = self._ranks, self._rank_zero, self._ending
        if ranks is None or rank_zero is None:
            return 0
        deadline = time.monotonic() + self.config.drain_seconds
        while ranks.poll() is None:
            rank_zero.hear()
            is_complete = ranks.joined and time.monotonic() <= deadline
            if is_complete and ranks.node_rank == 0:
                is_complete = rank_zero.ask_to_end()
            if not is_complete and not self._ending:
                self._keeper.submit(self._end_ranks)
                self._ending = True
            time.sleep(POLL_SECONDS)
        rank_zero.hear()
        if by_master or ranks.node_rank != 0:
            return 0
        if rank_zero.code is None and rank_zero.is_ready:
            raise RanksFailed(ranks.failure or "rank 0 ended without its exit code")
        return TERMINATED if rank_zero.code is None else rank_zero.code

    def _close(self) -> None:
        super()._close()
        self._drop_rank_zero()

    def _drop_rank_zero(self) -> None:
        with self._lock:
            rank_zero, self._rank_zero = self._rank_zero, None
        if rank_zero is not None:
            rank_zero.close()
