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

from cluster.elastic.config import elastic_config
from cluster.elastic.driver import Driver
from cluster.elastic.events import Released, RoundsStage
from cluster.elastic.rounds import Rounds
from cluster.errors import CallError
from cluster.worker import Context, Member, Stage, SubMaster

logger = logging.getLogger(__name__)

STOP_SECONDS = 60.0
"""How long the job may take to stop after the training failed for good."""


class ElasticTrainingFailed(Exception):
    """The training failed for good, or can never begin."""


class ElasticMaster(SubMaster):
    """Manages the ElasticWorkers of one role."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        config = elastic_config(context.config)
        self.rounds = Rounds(config.rules(context.count))
        self._driver = Driver(self.rounds, context, config.check_seconds)
        self._running = threading.Lock()
        """Held by the hook that runs the driver."""

    def status(self) -> str:
        """Says how far the training is."""
        rounds = self.rounds
        aside = f"; set aside: {', '.join(rounds.set_aside)}" if rounds.set_aside else ""
        slow = f"; {'; '.join(rounds.stragglers)}" if rounds.stragglers else ""
        return f"{rounds.stage.value}, round {rounds.round}, {len(rounds.members)} workers{aside}{slow}"

    def check_child(self, children: Sequence[Member]) -> None:
        """Checks the workers' nodes. Returns early if some are to be created again: it is then called again.

        During training it returns at once, since the workers are checked between the rounds.
        """
        if not self._running.acquire(blocking=False):
            return
        try:
            replaced = {(child.worker, child.incarnation) for child in children}
            asyncio.run(self._driver.run(lambda: self._is_checked(replaced)))
        finally:
            self._running.release()
        self._raise_failure()

    def _is_checked(self, children: set[tuple[str, int]]) -> bool:
        waits = self.rounds.stage in (RoundsStage.GATHERING, RoundsStage.CHECKING)
        return not waits or self.context.stop.is_set() or any(worker in children for worker in self._driver.replacing)

    def start(self) -> None:
        """Trains until the script has succeeded on all ranks, round after round."""
        with self._running:
            released = Released(time.monotonic())
            asyncio.run(self._driver.run(self._is_over, released))
        if self.context.stop.is_set():
            return
        try:
            self._raise_failure()
        except ElasticTrainingFailed as error:
            self.context.stop_job(str(error), 1)
            self.context.stop.wait(STOP_SECONDS)
            raise
        self._finish_workers()

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
            members = self.context.members(self.context.role)
            if all(member.stage in (Stage.FINISH, Stage.FAILED) for member in members):
                return
            for worker in self._driver.living().values():
                try:
                    rank = int(worker.name.rpartition("-")[2])
                    group.call("finish", worker.incarnation, rank=rank, timeout=5.0).result()
                except CallError as error:
                    logger.info("%s was not told that the training is complete: %s", worker, error)
            self.context.stop.wait(0.2)
