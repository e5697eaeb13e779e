"""The SubMaster of torch training: checks the nodes, starts the user's script on all ranks, and restarts it after failures.

`rounds.Rounds` decides, `driver.Driver` carries out. A new incarnation of this SubMaster asks the workers what they do, and
takes over a round that runs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from counterpoint.cluster.calls.remote import remote
from counterpoint.cluster.elastic.config import ElasticConfig, elastic_config
from counterpoint.cluster.elastic.driver import Driver
from counterpoint.cluster.elastic.events import Released, RoundsStage
from counterpoint.cluster.elastic.rounds import Rounds
from counterpoint.cluster.elastic.scaling import Scaler
from counterpoint.cluster.errors import CallError
from counterpoint.cluster.worker import Context, Member, Stage, SubMaster
from counterpoint.transport.errors import UserError

logger = logging.getLogger(__name__)

STOP_SECONDS = 60.0
"""How long the job may take to stop after the training failed for good."""


class ElasticTrainingFailed(Exception):
    """The training failed for good, or can never begin."""


def scaler_of(config: ElasticConfig, context: Context) -> Scaler | None:
    """Returns what scales the role; None if its configuration does not say so.

    Raises `UserError` where `min_workers` or `max_workers` is beyond what the role may have.
    """
    scaling = config.scaling
    if scaling is None:
        return None
    rules = config.rules(context.count)
    if not context.fewest <= rules.min_workers <= rules.max_workers <= context.most:
        raise UserError(
            f"scaling between min_workers = {rules.min_workers} and max_workers = {rules.max_workers}, but role "
            f"{context.role!r} may have {context.fewest} to {context.most} workers; set its min_count and max_count"
        )
    return Scaler(
        scaling.make_policy(), rules.min_workers, rules.max_workers, scaling.window_seconds, dry_run=scaling.dry_run
    )


class ElasticMaster(SubMaster):
    """Manages the ElasticWorkers of one role."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        config = elastic_config(context.config)
        self.rounds = Rounds(config.rules(context.count))
        self._scaler = scaler_of(config, context)
        self._driver = Driver(self.rounds, context, config.check_seconds, self._scaler)
        self._running = threading.Lock()
        """Held by the hook that runs the driver."""

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
        if not self._running.acquire(blocking=False):
            return
        try:
            self.do_node_check(children)
        finally:
            self._running.release()
        self._raise_failure()

    def do_node_check(self, children: Sequence[Member]) -> None:
        """Has every worker check its node, alone and in pairs; returns once it is known who passed, or is to be created again."""
        replaced = {(child.worker, child.incarnation) for child in children}
        asyncio.run(self._driver.run(lambda: self._is_checked(replaced)))

    def _is_checked(self, children: set[tuple[str, int]]) -> bool:
        waits = self.rounds.stage in (RoundsStage.GATHERING, RoundsStage.CHECKING)
        return not waits or self.context.stop.is_set() or any(worker in children for worker in self._driver.replacing)

    def start(self) -> None:
        """Trains until the script has succeeded on all ranks, round after round."""
        self.start_elastic_job()
        if self.context.stop.is_set():
            return
        try:
            self._raise_failure()
        except ElasticTrainingFailed as error:
            self.context.stop_job(str(error), 1)
            self.context.stop.wait(STOP_SECONDS)
            raise
        self._finish_workers()

    def start_elastic_job(self) -> None:
        """Has the workers run the user's script, round after round, until it is over or the job stops."""
        with self._running:
            asyncio.run(self._driver.run(self._is_over, Released(time.monotonic())))

    @remote(idempotent=True)
    def rendezvous(self) -> dict[str, Any]:
        """Returns where the ranks meet: `round`, its `members` by rank, and `host` and `port` of its store, a torch `TCPStore`.

        `members` is empty while no round runs. For whoever takes part in the training or watches it, by
        `context.group(f"{role}-master")`.
        """
        return self._driver.meeting.as_dict()

    def _is_over(self) -> bool:
        return self.rounds.stage is RoundsStage.ENDED or self.context.stop.is_set()

    def _raise_failure(self) -> None:
        ending = self.rounds.ending
        if self.rounds.stage is RoundsStage.ENDED and ending is not None and ending.code != 0:
            raise ElasticTrainingFailed(f"{self.context.role}: {ending.reason}")

    def _finish_workers(self) -> None:
        """Tells every worker that the training is complete, until all have finished; one may be created again meanwhile."""
        group = self.context.group(self.context.role)
        while not self.context.stop.is_set():
            members = self.context.get_nodes_by_role(self.context.role)
            if all(member.stage in (Stage.FINISH, Stage.FAILED) for member in members):
                return
            for worker in self._driver.living().values():
                try:
                    rank = int(worker.name.rpartition("-")[2])
                    group.call("finish", worker.incarnation, rank=rank, timeout=5.0).result()
                except CallError as error:
                    logger.info("%s was not told that the training is complete: %s", worker, error)
            self.context.stop.wait(0.2)
