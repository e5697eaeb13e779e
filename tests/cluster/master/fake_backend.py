"""A backend in memory: keepers and workers that outlive any master, as the real ones do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from counterpoint.cluster.backends.base import Bundle, Node, WorkerHeartbeat
from counterpoint.cluster.backends.order import LivingWorker, WorkerOrder
from counterpoint.cluster.errors import BackendError, CapacityError, StaleMasterError
from counterpoint.cluster.manager.events import (
    ChildrenChecked,
    Created,
    Event,
    FailoverDone,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
    WorkFinished,
)
from counterpoint.cluster.member import Member


@dataclass
class FakeWorker:
    """A worker's process."""

    order: WorkerOrder
    pid: int
    ready: bool = False
    started: bool = False


@dataclass
class World:
    """One node with its keeper and all processes: what is there whether or not a master is."""

    epoch: int = 0
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    reports: list[Event] = field(default_factory=list)
    """What no master has acknowledged, in order."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    created: list[tuple[str, int]] = field(default_factory=list)
    """Every process that was ever started."""
    ran_twice: list[str] = field(default_factory=list)
    on_start: Callable[[World, str, int], None] | None = None
    """What a worker does when its `start` is called; it finishes at once unless set."""
    capacity: int = 1000
    bundles: set[str] = field(default_factory=set)
    ended: bool = False
    commands: list[str] = field(default_factory=list)
    fails: dict[str, int] = field(default_factory=dict)
    """How often each method still raises `BackendError`."""
    published: dict[str, Member] = field(default_factory=dict)

    def report(self, event: Event) -> None:
        self.reports.append(event)
        self.arrived.set()

    def end(self, worker: str, code: int, reason: str = "") -> None:
        """Ends a process."""
        gone = self.workers.pop(worker, None)
        if gone is not None:
            self.report(WorkerExited(worker, gone.order.incarnation, code, reason, 0.0))

    def finish(self, worker: str) -> None:
        """What a task does at the end of its work."""
        living = self.workers[worker]
        self.report(WorkFinished(worker, living.order.incarnation, 0.0))
        self.end(worker, 0)


class FakeBackend:
    """One master's connection with the world."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world, self.epoch = world, epoch
        self._given: list[Event] = []
        self._closed = False

    def _obey(self, what: str) -> None:
        if self._closed:
            raise AssertionError(f"{what} after close")
        if self.epoch < self.world.epoch:
            raise StaleMasterError(f"the keeper has seen epoch {self.world.epoch}, this master has {self.epoch}")
        self.world.epoch = self.epoch
        self.world.commands.append(what)
        method = what.split()[0]
        if self.world.fails.get(method, 0) > 0:
            self.world.fails[method] -= 1
            raise BackendError(f"{method} is made to fail")

    async def check_capacity(self, bundles: Sequence[Bundle]) -> None:
        if len(bundles) > self.world.capacity:
            raise CapacityError(f"wanted {len(bundles)} places, present {self.world.capacity}")

    async def allocate(self, bundle: Bundle, avoid: Sequence[str]) -> None:
        self._obey(f"allocate {bundle.name}")
        if len(self.world.bundles | {bundle.name}) > self.world.capacity:
            raise CapacityError("there is no room")
        self.world.bundles.add(bundle.name)

    async def create(self, order: WorkerOrder) -> None:
        self._obey(f"create {order.worker} {order.incarnation}")
        await asyncio.sleep(0)
        living = self.world.workers.get(order.worker)
        if living is None or living.order.incarnation < order.incarnation:
            if living is not None:
                self.world.ran_twice.append(order.worker)
            self.world.created.append((order.worker, order.incarnation))
            living = FakeWorker(order, 1000 + len(self.world.created))
            self.world.workers[order.worker] = living
        self.world.report(Created(order.worker, order.incarnation, "here", living.pid, 0.0))
        if not living.ready:
            living.ready = True
            self.world.report(WorkerReady(order.worker, order.incarnation, f"ipc://{order.worker}", "", 0.0))

    async def start(self, worker: str, incarnation: int) -> None:
        self._obey(f"start {worker} {incarnation}")
        living = self.world.workers.get(worker)
        if living is None or living.order.incarnation != incarnation:
            return
        self.world.report(WorkerStarted(worker, incarnation, 0.0))
        if not living.started:
            living.started = True
            if self.world.on_start is not None:
                self.world.on_start(self.world, worker, incarnation)
            elif living.order.description.get("task"):
                self.world.finish(worker)

    async def check_children(self, worker: str, incarnation: int, check: int, children: Sequence[Member]) -> None:
        self._obey(f"check_children {worker} {[child.worker for child in children]}")
        self.world.report(ChildrenChecked(worker, incarnation, check, 0.0))

    async def failover(self, worker: str, incarnation: int, notice: int, failed: Sequence[Member]) -> None:
        self._obey(f"failover {worker} {[one.worker for one in failed]}")
        self.world.report(FailoverDone(worker, incarnation, notice, 0.0))

    async def publish(self, members: Sequence[Member]) -> None:
        self._obey("publish")
        self.world.published |= {member.worker: member for member in members}

    async def stop(self, worker: str, incarnation: int) -> None:
        self._obey(f"stop {worker} {incarnation}")
        self._end(worker, incarnation, 0)

    async def kill(self, worker: str, incarnation: int) -> None:
        self._obey(f"kill {worker} {incarnation}")
        self._end(worker, incarnation, 137)

    def _end(self, worker: str, incarnation: int, code: int) -> None:
        living = self.world.workers.get(worker)
        if living is not None and living.order.incarnation == incarnation:
            self.world.end(worker, code)
        else:
            self.world.report(WorkerExited(worker, incarnation, code, "there is no such process", 0.0))

    async def release(self, bundle: str) -> None:
        self._obey(f"release {bundle}")
        self.world.bundles.discard(bundle)

    async def events(self) -> AsyncIterator[Event | WorkerHeartbeat]:
        while True:
            for report in [one for one in self.world.reports if not any(one is given for given in self._given)]:
                self._given.append(report)
                yield report
            self.world.arrived.clear()
            await self.world.arrived.wait()

    async def acknowledge(self, event: Event | WorkerHeartbeat) -> None:
        self.world.reports = [one for one in self.world.reports if one is not event]

    def handles(self) -> Mapping[str, Any]:
        return {"here": {"pid": 1}}

    async def adopt(self, handles: Mapping[str, Any]) -> Sequence[LivingWorker]:
        self._obey("adopt")
        return [
            LivingWorker(name, one.order.incarnation, "here", one.pid, one.ready, one.started, f"ipc://{name}")
            for name, one in self.world.workers.items()
        ]

    async def nodes(self) -> Sequence[Node]:
        return [Node("here", True, {"cpu": 4.0})]

    async def close(self, *, end: bool) -> None:
        self._closed = True
        if end:
            self.world.ended = True
            self.world.workers.clear()
