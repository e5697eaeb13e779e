"""The SubMaster of torch training: its hooks run the rounds (`rounds.Rounds`) on the workers of its role.

A new incarnation of it asks the workers what they do, and takes over a round that runs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

from counterpoint.cluster.calls.remote import remote
from counterpoint.cluster.elastic.config import ElasticConfig, elastic_config
from counterpoint.cluster.elastic.crew import Crew, WorkerId
from counterpoint.cluster.elastic.rounds import LOOK_SECONDS, UNDER_WAY, ElasticTrainingFailed, Rounds
from counterpoint.cluster.elastic.scaling import Scaler
from counterpoint.cluster.errors import CallError
from counterpoint.cluster.worker import Context, Member, Stage, SubMaster
from counterpoint.transport.errors import UserError

logger = logging.getLogger(__name__)

STOP_SECONDS = 60.0
"""How long the job may take to stop after the training failed for good."""

FINISH_SECONDS = 5.0
"""How long a worker may take to hear that the training is complete, before it is told again."""


def scaler_of(config: ElasticConfig, context: Context) -> Scaler | None:
    """Returns what scales the role; None if its configuration does not say so.

    Raises `UserError` where `min_workers` or `max_workers` is beyond what the role may have.
    """
    scaling = config.scaling
    if scaling is None:
        return None
    fewest, most = config.limits(context.count)
    if not context.fewest <= fewest <= most <= context.most:
        raise UserError(
            f"scaling between min_workers = {fewest} and max_workers = {most}, but role {context.role!r} may have "
            f"{context.fewest} to {context.most} workers; set its min_count and max_count"
        )
    return Scaler(scaling.make_policy(), fewest, most, scaling.window_seconds, dry_run=scaling.dry_run)


class ElasticMaster(SubMaster):
    """Manages the ElasticWorkers of one role."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        config = elastic_config(context.config)
        self._scaler = scaler_of(config, context)
        self._crew = Crew(context)
        self.rounds = Rounds(self._crew, config, context.count, self._scaler)
        self._running = threading.Lock()
        """Held by the hook that runs the rounds."""

    def status(self) -> str:
        """Says how far the training is."""
        rounds = self.rounds
        aside = f"; set aside: {', '.join(rounds.set_aside)}" if rounds.set_aside else ""
        slow = f"; {'; '.join(rounds.stragglers)}" if rounds.stragglers else ""
        decision = self._scaler.last if self._scaler is not None else None
        scaling = f"; {decision}" if decision is not None else ""
        return f"{rounds.stage.value}, round {rounds.round}, {len(rounds.members)} workers{scaling}{aside}{slow}"

    def check_child(self, children: Sequence[Member]) -> None:
        """Does what `check_workers` does."""
        self.check_workers(children)

    def check_workers(self, children: Sequence[Member]) -> None:
        """Checks the workers' nodes. Returns early if some are to be created again: it is then called again.

        During training it returns at once, since the workers are checked between the rounds. Raises `ElasticTrainingFailed` if
        too few are left.
        """
        if self._running.acquire(blocking=False):
            try:
                self.do_node_check(children)
            finally:
                self._running.release()

    def do_node_check(self, children: Sequence[Member]) -> None:
        """Has every worker check its node, alone and in pairs; returns once it is known who passed, or is to be created again."""
        self._run(self.rounds.prepare([WorkerId(child.worker, child.incarnation) for child in children]))

    def start(self) -> None:
        """Trains until the script has succeeded on all ranks, round after round."""
        try:
            self.start_elastic_job()
        except ElasticTrainingFailed as error:
            self.context.stop_job(str(error), 1)
            self.context.stop.wait(STOP_SECONDS)
            raise
        self._finish_workers()

    def start_elastic_job(self) -> None:
        """Has the workers run the user's script, round after round, until it is over or the job stops.

        Raises `ElasticTrainingFailed`.
        """
        with self._running:
            self._run(self.rounds.train())

    @remote(idempotent=True)
    def rendezvous(self) -> dict[str, Any]:
        """Returns where the ranks meet: `round`, its `members` by rank, and `host` and `port` of its store, a torch `TCPStore`.

        `members` is empty while no round runs. For whoever takes part in the training or watches it, by
        `context.group(f"{role}-master")`.
        """
        rounds, address = self.rounds, self.rounds.address
        if rounds.stage not in UNDER_WAY or address is None:
            return {"round": rounds.round, "members": [], "host": "", "port": 0}
        members = [member.name for member in rounds.members]
        return {"round": rounds.round, "members": members, "host": address[0], "port": address[1]}

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs it until the job stops."""

        async def until_stopped() -> None:
            task = asyncio.create_task(work)
            while not task.done() and not self.context.stop.is_set():
                await asyncio.wait([task], timeout=LOOK_SECONDS)
            if task.done():  # else `asyncio.run` cancels it
                task.result()

        asyncio.run(until_stopped())

    def _finish_workers(self) -> None:
        """Tells every worker that the training is complete, until all have finished; one may be created again meanwhile."""
        group = self.context.group(self.context.role)
        while not self.context.stop.is_set():
            members = self.context.get_nodes_by_role(self.context.role)
            if all(member.stage in (Stage.FINISH, Stage.FAILED) for member in members):
                return
            for worker in self._crew.living().values():
                try:
                    group.call("finish", worker.incarnation, rank=worker.rank, timeout=FINISH_SECONDS).result()
                except CallError as error:
                    logger.info("%s was not told that the training is complete: %s", worker, error)
            self.context.stop.wait(0.2)
