"""What backends share whose workers live behind agents: links, orders, the events' queue, lost agents, and adoption.

A subclass says where agents come from: `seat_for` starts or finds the agent for an order, and `fence` makes sure that nothing of
a lost one runs any more. Only then is its loss told, so that a worker is never created again beside its former self.

A seat is a place for an agent, of which there is one at a time: on one machine a node, on Ray one worker's actor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import zmq.asyncio

from counterpoint.cluster.agent import protocol
from counterpoint.cluster.agent.order import LivingWorker, WorkerOrder
from counterpoint.cluster.agent.settings import AgentEndpoint
from counterpoint.cluster.agent.table import NO_PROCESS
from counterpoint.cluster.backends.agent_link import AgentLink, Identity, Listener
from counterpoint.cluster.backends.base import Backend, Heartbeat
from counterpoint.cluster.errors import BackendError, StaleMasterError
from counterpoint.cluster.manager.events import Created, CreateFailed, Event, NodeLost, WorkerExited
from counterpoint.cluster.member import Member
from counterpoint.cluster.spec import JobSpec
from counterpoint.transport.wires.endpoint import CurveKeys

logger = logging.getLogger(__name__)

END_SECONDS = 10.0
"""How long `close(end=True)` waits for the agents to end in order."""

Key = tuple[str, int]
"""A worker and its incarnation."""


@dataclass(slots=True)
class Seat:
    """A place for an agent, and the agent that has it."""

    name: str
    node: str
    link: AgentLink | None = None
    workers: dict[Key, bool] = field(default_factory=dict)
    """The workers that it was told to create and whose end was not reported: whether their creation was."""
    bundles: dict[Key, str] = field(default_factory=dict)
    """Their bundles, as far as this master knows."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an agent is started, found, or made sure to be gone."""


class AgentFleet(Backend, Listener):
    """The base; places are a subclass's. Make it on the event loop that uses it; `close` it."""

    def __init__(
        self,
        job: JobSpec,
        directory: Path,
        epoch: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        keys: CurveKeys | None = None,
    ) -> None:
        """Takes the job and the master's epoch. `clock` dates the events."""
        self.job, self.directory, self.epoch = job, directory, epoch
        self.seats: dict[str, Seat] = {}
        self._clock = clock
        self._identity = Identity(job.name, epoch, job.lease_seconds, keys)
        self._context = zmq.asyncio.Context()
        self._events: deque[Event] = deque()
        self._beats: dict[str, Heartbeat] = {}
        """The latest of each worker that was not taken yet."""
        self._arrived = asyncio.Event()
        self._sources: dict[Event, tuple[AgentLink, int]] = {}
        """The agent from which each event came that is not acknowledged."""
        self._stale: StaleMasterError | None = None
        self._members: dict[str, Member] = {}
        self._workers: dict[str, asyncio.Lock] = {}
        """Held while a worker is created or ended: what ends it must not overtake what creates it."""
        self._tasks: set[asyncio.Task[None]] = set()

    # --- for subclasses ---

    @abstractmethod
    async def seat_for(self, order: WorkerOrder) -> Seat:
        """Returns the seat for a new worker, with an agent that is linked and usable. Raises `BackendError`."""

    @abstractmethod
    async def fence(self, seat: Seat, endpoint: AgentEndpoint, patience: float = 0.0) -> bool:
        """Returns once nothing of the seat's agent runs any more; it may end by itself for so many seconds, then it is killed.

        True: its whole node is gone, and what was there may be placed elsewhere. False: only the agent is.
        """

    def watch(self, seat: Seat, link: AgentLink) -> None:
        """Called with each new link, before it connects: a backend that hears of an agent's death calls `link.lose` then."""

    async def link_to(self, seat: Seat, endpoint: AgentEndpoint) -> AgentLink:
        """Connects a seat to its agent. Raises as `AgentLink.connect`. Hold the seat's lock."""
        link = AgentLink(self._context, endpoint, self._identity, self, self._clock)
        seat.link = link
        self.watch(seat, link)  # first: an agent that dies meanwhile is not waited for
        try:
            await link.connect()
            if self._members:
                await link.command(protocol.PUBLISH, members=[asdict(member) for member in self._members.values()])
        except BaseException:
            seat.link = None
            await link.close()
            raise
        for living in link.workers:
            seat.workers.setdefault((living.worker, living.incarnation), False)
            seat.bundles[living.worker, living.incarnation] = living.bundle
        return link

    def put(self, event: Event) -> None:
        """Lets an event of the backend's own arrive."""
        self._events.append(event)
        self._arrived.set()

    # --- orders ---

    async def create(self, order: WorkerOrder) -> None:
        """See `Backend.create`."""
        key = (order.worker, order.incarnation)
        async with self._lock_of(order.worker):
            self._raise_if_stale()
            seat = await self.seat_for(order)
            assert seat.link is not None
            seat.workers.setdefault(key, False)
            seat.bundles[key] = order.bundle
            await seat.link.command(protocol.CREATE, **asdict(order))

    async def start(self, worker: str, incarnation: int) -> None:
        """See `Backend.start`."""
        await self._order(worker, incarnation, {"kind": protocol.START})

    async def check_children(self, worker: str, incarnation: int, check: int, children: Sequence[Member]) -> None:
        """See `Backend.check_children`."""
        order = {"kind": protocol.CHECK_CHILDREN, "check": check, "children": [asdict(child) for child in children]}
        await self._order(worker, incarnation, order)

    async def failover(self, worker: str, incarnation: int, notice: int, failed: Sequence[Member]) -> None:
        """See `Backend.failover`."""
        order = {"kind": protocol.FAILOVER, "notice": notice, "failed": [asdict(member) for member in failed]}
        await self._order(worker, incarnation, order)

    async def stop(self, worker: str, incarnation: int) -> None:
        """See `Backend.stop`."""
        await self._end_worker(protocol.STOP, worker, incarnation)

    async def kill(self, worker: str, incarnation: int) -> None:
        """See `Backend.kill`."""
        await self._end_worker(protocol.KILL, worker, incarnation)

    async def publish(self, members: Sequence[Member]) -> None:
        """Does as `Backend.publish`; a lost agent has nobody to tell."""
        self._raise_if_stale()
        self._members |= {member.worker: member for member in members}
        links = [seat.link for seat in self.seats.values() if seat.link is not None and not seat.link.lost]
        maps = [asdict(member) for member in members]
        answers = await asyncio.gather(
            *(link.command(protocol.PUBLISH, members=maps) for link in links), return_exceptions=True
        )
        for link, answer in zip(links, answers, strict=True):
            if isinstance(answer, BaseException) and not (isinstance(answer, BackendError) and link.lost):
                raise answer

    async def kill_bundle(self, bundle: str) -> None:
        """Kills whatever is in a bundle."""
        inside = [key for seat in self.seats.values() for key, its in seat.bundles.items() if its == bundle]
        for worker, incarnation in inside:
            await self.kill(worker, incarnation)

    async def _order(self, worker: str, incarnation: int, order: Mapping[str, Any]) -> None:
        self._raise_if_stale()
        seat = self._seat_of(worker, incarnation)
        if seat is None or seat.link is None or seat.link.lost:
            return  # its end was told, or will be
        await seat.link.command(protocol.ORDER, worker=worker, incarnation=incarnation, order=order)

    async def _end_worker(self, kind: str, worker: str, incarnation: int) -> None:
        async with self._lock_of(worker):
            self._raise_if_stale()
            seat = self._seat_of(worker, incarnation)
            if seat is None:
                gone = WorkerExited(worker, incarnation, NO_PROCESS, "it has no process", self._clock())
                self.put(gone)
            elif seat.link is not None and not seat.link.lost:
                await seat.link.command(kind, worker=worker, incarnation=incarnation)

    def _seat_of(self, worker: str, incarnation: int) -> Seat | None:
        return next((seat for seat in self.seats.values() if (worker, incarnation) in seat.workers), None)

    def _lock_of(self, worker: str) -> asyncio.Lock:
        return self._workers.setdefault(worker, asyncio.Lock())

    def _raise_if_stale(self) -> None:
        if self._stale is not None:
            raise self._stale

    # --- events ---

    async def events(self) -> AsyncIterator[Event | Heartbeat]:
        """See `Backend.events`. Raises `StaleMasterError` once an agent has obeyed another master."""
        while True:
            self._raise_if_stale()
            if self._events:
                yield self._events.popleft()
            elif self._beats:
                yield self._beats.pop(next(iter(self._beats)))
            else:
                self._arrived.clear()
                await self._arrived.wait()

    async def acknowledge(self, event: Event | Heartbeat) -> None:
        """See `Backend.acknowledge`."""
        source = None if isinstance(event, Heartbeat) else self._sources.pop(event, None)
        if source is not None:
            link, number = source
            link.acknowledge(number)

    def on_report(self, link: AgentLink, number: int, event: Event) -> None:
        """See `Listener.on_report`."""
        seat = next((seat for seat in self.seats.values() if seat.link is link), None)
        match event:
            case Created(worker, incarnation) if seat is not None:
                seat.workers[worker, incarnation] = True
            case WorkerExited(worker, incarnation) | CreateFailed(worker, incarnation) if seat is not None:
                seat.workers.pop((worker, incarnation), None)
                seat.bundles.pop((worker, incarnation), None)
        self._sources[event] = (link, number)
        self.put(event)

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """See `Listener.on_heartbeat`."""
        waiting = self._beats.get(heartbeat.worker)
        if waiting is not None and waiting.alive and waiting.incarnation == heartbeat.incarnation:
            heartbeat = replace(heartbeat, alive=True)
        self._beats[heartbeat.worker] = heartbeat
        self._arrived.set()

    def on_stale(self, error: StaleMasterError) -> None:
        """See `Listener.on_stale`."""
        self._stale = error
        self._arrived.set()

    def on_lost(self, link: AgentLink, reason: str) -> None:
        """See `Listener.on_lost`."""
        seat = next((seat for seat in self.seats.values() if seat.link is link), None)
        if seat is not None and self._stale is None:
            self.begin(self._bury(seat, link, reason))

    async def _bury(self, seat: Seat, link: AgentLink, reason: str) -> None:
        """Tells of the workers of a lost agent, once nothing of it runs."""
        async with seat.lock:
            if seat.link is not link:
                return
            node_gone = await self.fence(seat, link.endpoint)
            self._raise_if_stale()
            await link.close()
            seat.link = None
            words, at = f"its agent is gone: {reason}", self._clock()
            for worker, incarnation in [key for key, created in seat.workers.items() if not created]:
                self.put(CreateFailed(worker, incarnation, words, at))
            lived = [key for key, created in seat.workers.items() if created]
            if node_gone and lived:
                self.put(NodeLost(seat.node, words, at))
            elif not node_gone:
                for worker, incarnation in lived:
                    self.put(WorkerExited(worker, incarnation, NO_PROCESS, words, at))
            seat.workers.clear()
            seat.bundles.clear()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something beside the master's calls; what it raises is logged."""

        async def guarded() -> None:
            try:
                await work
            except StaleMasterError as error:
                self.on_stale(error)
            except Exception:
                logger.exception("a task of the backend failed")

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- adoption and end ---

    async def adopt_seats(self, found: Iterable[tuple[Seat, AgentEndpoint]]) -> Sequence[LivingWorker]:
        """Links to agents of an earlier master; what does not answer is fenced. Returns what lives.

        The reports that they kept are among the events then. Raises `StaleMasterError`.
        """
        pairs = list(found)
        answers = await asyncio.gather(
            *(self._adopt_one(seat, endpoint) for seat, endpoint in pairs), return_exceptions=True
        )
        living: list[LivingWorker] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            living += answer
        return living

    async def _adopt_one(self, seat: Seat, endpoint: AgentEndpoint) -> Sequence[LivingWorker]:
        self.seats[seat.name] = seat
        async with seat.lock:
            try:
                link = await self.link_to(seat, endpoint)
            except BackendError as error:
                logger.warning("cannot adopt the agent of node %s: %s", seat.node, error)
                await self.fence(seat, endpoint)
                return []
        await link.wait_for_reports()
        for living in link.workers:
            if (living.worker, living.incarnation) in seat.workers:
                seat.workers[living.worker, living.incarnation] = True
        return [one for one in link.workers if (one.worker, one.incarnation) in seat.workers]

    async def close(self, *, end: bool) -> None:
        """See `Backend.close`."""
        if end:
            self._raise_if_stale()
            await asyncio.gather(*(self._end_seat(seat) for seat in list(self.seats.values())))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for seat in self.seats.values():
            if seat.link is not None:
                await seat.link.close()
                seat.link = None
        self._context.term()

    async def _end_seat(self, seat: Seat) -> None:
        async with seat.lock:
            link, seat.link = seat.link, None
            if link is None:
                return
            try:
                if not link.lost:
                    try:
                        await link.command(protocol.END)
                    except BackendError as error:
                        logger.warning("the agent of node %s did not end in order: %s", seat.node, error)
                await self.fence(seat, link.endpoint, END_SECONDS)
            finally:  # also when it is cancelled: the seat has forgotten the link, and an open socket would hold up `close`
                await link.close()
