"""The workers of an elastic role as its SubMaster sees them: who takes calls, what each says of its ranks, and who is replaced.

A worker is known by name and incarnation; every call names the incarnation that it means.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from counterpoint.cluster.elastic.progress import NOTHING, Totals
from counterpoint.cluster.worker import Context, Stage
from counterpoint.transport.typed import typed

logger = logging.getLogger(__name__)

CALL_SECONDS = 15.0
"""Deadline of a call that takes no time by itself."""

REPEAT_SECONDS = 5.0
"""A request to replace a worker is repeated until it is gone: it may get lost with the master that received it."""


class WorkerId(NamedTuple):
    """One life of a worker."""

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name} (incarnation {self.incarnation})"

    @property
    def rank(self) -> int:
        """The number at the end of its name."""
        return int(self.name.rpartition("-")[2])


class Activity(StrEnum):
    """What a worker does with its ranks."""

    IDLE = "IDLE"
    JOINING = "JOINING"
    TRAINING = "TRAINING"
    SUCCEEDED = "SUCCEEDED"
    """All of them ended with code 0."""
    FAILED = "FAILED"
    """One of them failed, and the others were ended."""

    @property
    def has_ranks(self) -> bool:
        """Whether ranks are there."""
        return self in (Activity.JOINING, Activity.TRAINING)


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says of itself. `round` and `members` are those of the last round it was in; 0 and none before that."""

    activity: Activity
    round: int = 0
    members: tuple[WorkerId, ...] = ()
    reason: str = ""
    totals: Totals = NOTHING
    """What its ranks have done in the round."""

    @property
    def state(self) -> str:
        """Differs once there is something to report."""
        return f"{self.activity.value.lower()}, round {self.round}"


class Crew:
    """The workers of `context.role`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.role = context.role
        self._replacing: dict[WorkerId, tuple[str, float]] = {}
        """Workers that are to be created again: why, and when that was last asked for."""

    def living(self) -> dict[str, WorkerId]:
        """Returns the workers that take calls, by name in the order of ranks, without those that are to be replaced."""
        members = self._context.get_nodes_by_role(self.role)
        living = {
            member.worker: WorkerId(member.worker, member.incarnation)
            for member in members
            if member.stage in (Stage.READY, Stage.RUNNING) and member.address
        }
        for worker, (reason, asked) in [*self._replacing.items()]:
            if living.get(worker.name) != worker:
                del self._replacing[worker]
                continue
            del living[worker.name]
            if time.monotonic() - asked > REPEAT_SECONDS:
                self.replace(worker, reason)
        return dict(sorted(living.items(), key=lambda item: item[1].rank))

    @property
    def expected(self) -> int:
        """How many workers exist or are being created."""
        members = self._context.get_nodes_by_role(self.role)
        return sum(member.stage not in (Stage.FINISH, Stage.FAILED) for member in members)

    @property
    def finished(self) -> set[str]:
        """Names of workers that have finished: they were told that the training is complete, or were removed."""
        members = self._context.get_nodes_by_role(self.role)
        return {member.worker for member in members if member.stage is Stage.FINISH}

    def replace(self, worker: WorkerId, reason: str) -> None:
        """Has a worker killed and created again, on its node or another; it counts as gone from now on."""
        self._replacing[worker] = (reason, time.monotonic())
        self._context.replace(worker.name, worker.incarnation, reason)

    def scale(self, count: int) -> None:
        """Asks for so many workers."""
        self._context.scale(count)

    async def call(self, worker: WorkerId, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """Calls a worker's method. Raises `CallError`."""
        group = self._context.group(self.role)
        return await group.call(method, worker.incarnation, *arguments, rank=worker.rank, timeout=seconds)

    async def report(self, worker: WorkerId, known: Report | None = None, seconds: float = 0.0) -> Report:
        """Returns what a worker does, once it is another thing than known, or after `seconds`. Raises `CallError`."""
        state = "" if known is None else known.state
        said = await self.call(worker, "report", state, seconds, seconds=seconds + CALL_SECONDS)
        return typed(said, Report, "its report", ValueError)
