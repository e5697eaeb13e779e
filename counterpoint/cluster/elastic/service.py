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

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec

from counterpoint.cluster.elastic.elastic_master import ElasticMaster
from counterpoint.cluster.elastic.elastic_worker import POLL_SECONDS, ElasticWorker
from counterpoint.cluster.elastic.rounds import RoundsStage
from counterpoint.cluster.worker import Context, Member
from counterpoint.transport.process.ranks.node import RanksProcess
from counterpoint.transport.process.start_time import LONGEST_STARTS

TERMINATED = 128 + signal.SIGTERM
"""Rank 0's exit code after a SIGTERM: ours, or that of torch's agent, which ends all ranks when one has died."""

EXIT_SECONDS = 3.0
"""A node whose ranks have succeeded waits this long for the others, so that it does not take the store from them. Rank 0 may end
with another code than 0, and is not heard of then."""

NO_TORCH = 2
"""Exit code without torch, which is final."""


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

    exit_seconds = EXIT_SECONDS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        if (limit := self.config.silence_seconds) is not None:
            self.rank_environment = {"WATCHDOG_USEC": str(int(limit * 1e6))}

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

    def _code_to_report(self, ranks: RanksProcess) -> int | None:
        ranks.hear()
        return None  # this worker's own end tells it: the master must not have it end ranks first

    def _are_up(self, ranks: RanksProcess) -> bool:
        return super()._are_up(ranks) and (ranks.node_rank != 0 or "READY" in ranks.said)

    def _look(self) -> None:
        """Ends this worker as its ranks have ended, unless it was asked to end them, or if rank 0 is late or silent."""
        with self._lock:
            ranks = self._ranks
            if ranks is None or self._ending:
                return
            code = ranks.poll()
        if code is None:
            if ranks.node_rank == 0 and (trouble := self._trouble(ranks)):
                raise RanksFailed(f"{trouble}; all ranks are killed")  # `_close` does that
            return
        said = ranks.number("EXIT_STATUS")
        why, _ = ranks.said.get("X_FAILURE", ("", 0.0))
        if said == TERMINATED or (said is None and code != 0):
            raise RanksFailed(f"{ranks.failure}: {why}" if why else ranks.failure)
        raise SystemExit(said or 0) from (RanksFailed(why) if why else None)

    def _trouble(self, ranks: RanksProcess) -> str:
        """Returns what is wrong with rank 0, for a person; empty if nothing is."""
        now, limit, silence = time.monotonic(), self.config.ready_seconds, self.config.silence_seconds
        if "EXIT_STATUS" in ranks.said:
            return ""  # it ends
        if "READY" in ranks.said:
            heard = max(at for _, at in ranks.said.values())
            return f"rank 0 was silent for {silence:g} s" if silence is not None and now - heard > silence else ""
        _, asked = ranks.said.get("EXTEND_TIMEOUT_USEC", ("", 0.0))
        extended = asked + (ranks.number("EXTEND_TIMEOUT_USEC") or 0) / 1e6
        until = max(ranks.began + limit, min(extended, ranks.began + LONGEST_STARTS * limit))
        return f"rank 0 was not ready within {limit:g} s" if now > until else ""

    def _end_in_order(self) -> int:
        """Has rank 0 end the ranks, and waits for that; returns the exit code, which is rank 0's on its node, else 0."""
        with self._lock:
            ranks, by_master = self._ranks, self._ending
        if ranks is None:
            return 0
        asked, deadline = False, time.monotonic() + self.config.drain_seconds
        while ranks.poll() is None:
            rank_zero = ranks.number("MAINPID")
            is_late = ranks.node_rank is None or time.monotonic() > deadline
            if is_late or (ranks.node_rank == 0 and rank_zero is None):
                if not self._ending:
                    self._ending = True
                    self._keeper.submit(self._end_ranks)
            elif rank_zero is not None and not asked and not by_master:
                asked = True
                with suppress(ProcessLookupError):  # it has died, and torch's agent will notice
                    os.kill(rank_zero, signal.SIGTERM)
            time.sleep(POLL_SECONDS)
        if by_master or ranks.node_rank != 0:
            return 0
        code = ranks.number("EXIT_STATUS")
        if code is None and "READY" in ranks.said:
            raise RanksFailed(ranks.failure or "rank 0 ended without its exit code")
        return TERMINATED if code is None else code
