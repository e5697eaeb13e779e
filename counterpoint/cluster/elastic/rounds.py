"""The rounds of elastic training: workers are gathered, their nodes checked, the script runs on all of them, and so again.

A *round* is one start of the training on fixed members, whose ranks meet in torch's rendezvous and run below torch's elastic
agent. Any failure, and any newcomer, ends it: all members end their ranks, and the next begins. torch's rendezvous alone would
not do: an agent whose peer dies goes on until its own ranks fail or another node waits, its store dies with whoever has it, and
nobody checks nodes between two rounds. PrimeMaster creates dead workers again, so nothing here counts their deaths.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from counterpoint.cluster.elastic.check import check_nodes
from counterpoint.cluster.elastic.config import ElasticConfig
from counterpoint.cluster.elastic.crew import CALL_SECONDS, Activity, Crew, Report, WorkerId
from counterpoint.cluster.elastic.progress import Totals
from counterpoint.cluster.elastic.scaling import Scaler
from counterpoint.cluster.errors import CallError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""How often the list of members is looked at."""

REPORT_SECONDS = 5.0
"""How long a worker may hold back an unchanged report."""

REPORTS_IN_A_WINDOW = 20
"""How often a worker reports in each window in which the progress is measured, at least."""

UNRESPONSIVE_SECONDS = 60.0
"""A living worker whose reports fail for so long is replaced. Its silence is noticed elsewhere, and earlier."""

GIVE_UP_SECONDS = 600.0
"""How long fewer than `min_workers` wait; then the training fails."""

HEALTHY_SECONDS = 180.0
"""Seconds of training after which failed rounds are counted anew."""

MOST_CHECK_FAILURES = 3
"""Failed checks in a row after which a worker's node is set aside."""


class ElasticTrainingFailed(Exception):
    """The training failed for good, or can never begin."""


class RoundsStage(StrEnum):
    """The stage of the training as a whole."""

    GATHERING = "GATHERING"
    CHECKING = "CHECKING"
    READY = "READY"
    """Enough nodes are good."""
    RENDEZVOUS = "RENDEZVOUS"
    """The ranks are being started, and find one another."""
    TRAINING = "TRAINING"
    STOPPING_ALL = "STOPPING_ALL"
    ENDED = "ENDED"
    """The script has succeeded on all ranks, or the training has failed for good."""


UNDER_WAY = (RoundsStage.RENDEZVOUS, RoundsStage.TRAINING)


@dataclass(frozen=True, slots=True)
class _Over:
    """Why a round is over."""

    why: str
    failed: str = ""
    """What the script's own failure was, if that is why."""


class Rounds:
    """The rounds of one training."""

    def __init__(self, crew: Crew, config: ElasticConfig, count: int, scaler: Scaler | None = None) -> None:
        """Takes a role of `count` workers. A `scaler` gives it more or fewer, by the progress of the rounds."""
        self._crew, self._config, self._scaler = crew, config, scaler
        self._fewest, self._most = config.limits(count)
        self.stage = RoundsStage.GATHERING
        self.round = 0
        self.members: tuple[WorkerId, ...] = ()
        """The members of the current or last round, by rank; of the next one once their nodes have passed."""
        self.address: tuple[str, int] | None = None
        """Where the ranks of the round meet; None if an earlier SubMaster began it."""
        self.set_aside: dict[str, str] = {}
        """Workers whose nodes failed the check too often, with the last reason."""
        self.stragglers: list[str] = []
        """The stragglers of the last check, a line each."""
        self._began = False
        self._reports: dict[WorkerId, tuple[float, Report]] = {}
        """What each member said last in this round, and when."""
        self._check_failures: dict[str, int] = {}
        self._failed_rounds = 0
        self._training_since: float | None = None
        self._newcomers_since: float | None = None

    def _enter(self, stage: RoundsStage) -> None:
        if stage is not self.stage:
            logger.info("%s: %s -> %s, round %d", self._crew.role, self.stage, stage, self.round)
        self.stage = stage

    # --- before a round ---

    async def prepare(self, children: Collection[WorkerId] = ()) -> None:
        """Gathers workers and checks their nodes, until a round can start or one runs, or any of `children` is gone.

        Raises `ElasticTrainingFailed` if too few are left.
        """
        if not self._began:
            await self._take_over()
            self._began = True
        while self.stage not in (*UNDER_WAY, RoundsStage.ENDED):
            available = self._available()[: self._most]
            if self.stage is RoundsStage.READY and tuple(available) == self.members:
                return
            gathered = await self._gather(children)
            if not gathered:
                return
            if passed := await self._check(gathered):
                self.members = tuple(passed)
                self._enter(RoundsStage.READY)

    def _available(self) -> list[WorkerId]:
        return [worker for name, worker in self._crew.living().items() if name not in self.set_aside]

    async def _gather(self, children: Collection[WorkerId]) -> list[WorkerId]:
        """Returns the workers once all are there that may come, or enough are and the others take too long.

        Returns none if one of `children` is gone.
        """
        self._enter(RoundsStage.GATHERING)
        began = _now()
        while True:
            if not {*children} <= {*self._crew.living().values()}:
                return []
            available, coming = self._available(), self._crew.expected - len(self.set_aside)
            enough, waited = len(available) >= self._fewest, _now() - began
            late = waited >= (self._config.join_seconds if enough else GIVE_UP_SECONDS)
            if enough and (late or len(available) >= min(self._most, coming)):
                return available[: self._most]
            if late or (self.set_aside and coming < self._fewest):
                aside = "".join(f"; {name} was set aside: {why}" for name, why in self.set_aside.items())
                self._fail(f"only {len(available)} of at least {self._fewest} workers are there{aside}")
            await asyncio.sleep(LOOK_SECONDS)

    def _fail(self, reason: str) -> None:
        self._enter(RoundsStage.ENDED)
        raise ElasticTrainingFailed(f"{self._crew.role}: {reason}")

    async def _check(self, workers: list[WorkerId]) -> list[WorkerId]:
        """Returns those that passed; none if workers are to be created again before, or too few have passed."""
        if not self._config.check:
            return workers
        self._enter(RoundsStage.CHECKING)
        found = await check_nodes(self._crew, workers, self._config.check_seconds)
        self.stragglers = found.slow_nodes()
        for line in self.stragglers:
            logger.info("%s: %s", self._crew.role, line)
        passed = [worker for worker in workers if worker not in found.abnormal and worker not in found.gone]
        for worker in passed:
            self._check_failures.pop(worker.name, None)
        for worker in found.gone:
            if self._crew.living().get(worker.name) == worker:
                self._crew.replace(worker, "it does not answer during the node check")
        is_complete = not found.gone
        for worker, reason in found.abnormal.items():
            count = self._check_failures[worker.name] = self._check_failures.get(worker.name, 0) + 1
            if count >= MOST_CHECK_FAILURES:
                logger.info("%s failed %d node checks and is set aside: %s", worker, count, reason)
                self.set_aside[worker.name] = reason
            else:
                self._crew.replace(worker, f"it failed the node check: {reason}")
                is_complete = False
        return passed if is_complete and len(passed) >= self._fewest else []

    async def _take_over(self) -> None:
        """Goes on with a round that an earlier SubMaster began if it runs undisturbed; ends the ranks of any other."""
        reports: dict[WorkerId, Report] = {}
        for worker in self._crew.living().values():
            try:
                reports[worker] = await self._crew.report(worker)
            except CallError as error:
                logger.warning("%s does not say what it does, and counts as absent: %s", worker, error)
        finished = self._crew.finished
        if finished and self._crew.expected == 0:
            return self._enter(RoundsStage.ENDED)
        self.round = max((report.round for report in reports.values()), default=0)
        current = {w: r for w, r in reports.items() if r.round == self.round and r.activity is not Activity.IDLE}
        members = next((report.members for report in current.values()), ())
        if any(report.activity is Activity.SUCCEEDED for report in current.values()):
            ended = Report(Activity.SUCCEEDED, self.round, members)
            current = {w: ended for w in members if w.name in finished} | current
        if members and current.keys() == {*members}:
            self.members, self._reports = members, {worker: (_now(), report) for worker, report in current.items()}
            self._enter(RoundsStage.RENDEZVOUS)
            logger.info("round %d goes on under a new incarnation of its SubMaster", self.round)
        elif any(report.activity.has_ranks for report in reports.values()):
            logger.info("round %d has lost workers while no SubMaster was there", self.round)
            await self._stop()

    # --- rounds ---

    async def train(self) -> None:
        """Trains round after round until the script has succeeded on all ranks. Raises `ElasticTrainingFailed`."""
        while True:
            await self.prepare()
            if self.stage is RoundsStage.ENDED:
                return
            over = await self._begin_round() if self.stage is RoundsStage.READY else None
            over = over or await self._attend()
            if over is None:
                return self._enter(RoundsStage.ENDED)
            logger.info("%s: %s", self._crew.role, over.why)
            lived = self._training_since is not None and _now() - self._training_since >= HEALTHY_SECONDS
            await self._stop()
            if over.failed and {*self.members} <= {*self._crew.living().values()}:  # else a death was the cause
                self._failed_rounds = 1 if lived else self._failed_rounds + 1
                if self._failed_rounds > self._config.max_restarts:
                    self._fail(f"{self._failed_rounds} rounds failed in a row, the last on {over.failed}")
            self._enter(RoundsStage.GATHERING)

    async def _begin_round(self) -> _Over | None:
        """Has the members start their ranks, the first of them the store at which these meet."""
        self.round += 1
        self._reports, self._training_since, self._newcomers_since, self.address = {}, None, None, None
        self._enter(RoundsStage.RENDEZVOUS)
        first, *others = self.members
        start = ("start_elastic_job", self.round, [[*member] for member in self.members])
        address = await self._order(first, *start)
        if address is None or None in await asyncio.gather(*(self._order(w, *start, address) for w in others)):
            return _Over(f"round {self.round} could not start")
        self.address = (str(address[0]), int(address[1]))
        return None

    async def _order(self, worker: WorkerId, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """Returns a worker's answer; has one replaced that does not do what it was asked to do, and returns None."""
        try:
            return await self._crew.call(worker, method, *arguments, seconds=seconds)
        except CallError as error:
            if self._crew.living().get(worker.name) == worker:
                self._crew.replace(worker, str(error))
            return None

    async def _attend(self) -> _Over | None:
        """Follows a round; returns why another has to begin, None once the script has succeeded on all ranks."""
        followers = [asyncio.create_task(self._follow(worker)) for worker in self.members]
        try:
            while True:
                activities = {self._activity(worker) for worker in self.members}
                if activities == {Activity.SUCCEEDED}:
                    return None
                if (over := self._disturbance(activities)) is not None:
                    return over
                if self.stage is RoundsStage.RENDEZVOUS and Activity.JOINING not in activities:
                    self._training_since = _now()
                    self._enter(RoundsStage.TRAINING)
                if self._scaler is not None:
                    self._scale(self._scaler)
                for task in followers:
                    if task.done():
                        task.result()  # raises a defect of ours
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for task in followers:
                task.cancel()
            await asyncio.gather(*followers, return_exceptions=True)

    def _activity(self, worker: WorkerId) -> Activity:
        return self._reports[worker][1].activity if worker in self._reports else Activity.JOINING

    def _disturbance(self, activities: set[Activity]) -> _Over | None:
        """Returns what ends the round now, if anything does."""
        living = self._available()
        for worker in self.members:
            activity = self._activity(worker)
            if activity is Activity.FAILED:
                reason = self._reports[worker][1].reason
                return _Over(f"round {self.round} failed on {worker}: {reason}", f"{worker.name}: {reason}")
            if activity is Activity.IDLE:
                return _Over(f"{worker} has ended its ranks without being asked")
            if activity is not Activity.SUCCEEDED and worker not in living:
                return _Over(f"{worker} is gone in round {self.round}")
        could_be_more = len(self.members) < min(self._most, len(living))
        if not could_be_more or self.stage is not RoundsStage.TRAINING:
            self._newcomers_since = None
        elif self._newcomers_since is None:
            self._newcomers_since = _now()
        elif _now() - self._newcomers_since >= self._config.settle_seconds and Activity.SUCCEEDED not in activities:
            return _Over(f"round {self.round} ends so that more workers can join")
        return None

    async def _follow(self, worker: WorkerId) -> None:
        """Keeps what a member last said."""
        heard, seconds = _now(), REPORT_SECONDS
        if self._scaler is not None:  # so often that what is known of a window is of nearly all of it
            seconds = min(REPORT_SECONDS, self._scaler.window_seconds / REPORTS_IN_A_WINDOW)
        while self._activity(worker) is not Activity.SUCCEEDED:
            known = self._reports[worker][1] if worker in self._reports else None
            try:
                report = await self._crew.report(worker, known, seconds)
            except CallError as error:
                if _now() - heard > UNRESPONSIVE_SECONDS:
                    self._crew.replace(worker, f"it does not report: {error}")
                    return
                await asyncio.sleep(LOOK_SECONDS)
                continue
            heard = _now()
            self._reports[worker] = (heard, report)

    def _scale(self, scaler: Scaler) -> None:
        """Shows the scaler the progress of a round that all workers of the role take part in, and asks for what it decides."""
        at, totals = _now(), None
        said = [self._reports[worker] for worker in self.members if worker in self._reports]
        if self.stage is RoundsStage.TRAINING and len(said) == len(self.members) == self._crew.expected:
            at = sum(when for when, _ in said) / len(said)
            totals = sum((report.totals for _, report in said), Totals())
        decision = scaler.observe(at, self.round, len(self.members), totals)
        if decision is not None:
            logger.info("%s: %s", self._crew.role, decision)
            if decision.is_change:
                self._crew.scale(decision.wanted)

    async def _stop(self) -> None:
        """Has every worker end its ranks; one that does not in time is replaced."""
        self._enter(RoundsStage.STOPPING_ALL)
        seconds = self._config.stop_seconds + CALL_SECONDS
        stops = (self._order(w, "stop_round", self.round, seconds=seconds) for w in self._crew.living().values())
        await asyncio.gather(*stops)


def _now() -> float:
    return asyncio.get_running_loop().time()
