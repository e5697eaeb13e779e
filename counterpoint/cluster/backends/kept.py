"""What both backends share: the workers' keepers behind their links, orders to them, and the events that they tell.

Where a bundle's place is, how a keeper is made and how those of an earlier master are found, each says itself (`local.py`,
`on_ray.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Generic, TypeVar

from counterpoint.cluster.backends.base import Backend, WorkerHeartbeat
from counterpoint.cluster.backends.link import LEASES_OF_THE_FENCE, NO_PROCESS, Link
from counterpoint.cluster.backends.order import LivingWorker, WorkerOrder
from counterpoint.cluster.errors import BackendError, StaleMasterError
from counterpoint.cluster.manager.events import Event, WorkerExited
from counterpoint.cluster.member import Member
from counterpoint.cluster.spec import JobSpec
from counterpoint.transport.process.keeper import messages

logger = logging.getLogger(__name__)

END_SECONDS = 10.0
"""How long `close(end=True)` waits for the keepers to end in order."""

PREDECESSOR_SECONDS = 60.0
"""How long a new worker waits for the end of its earlier incarnation, which is killed, beside the fence of one that is lost."""

PULSE_SECONDS = 0.5
"""Seconds between two looks at the clock."""

Kind = TypeVar("Kind", bound=Link)


class KeptBackend(Backend, Generic[Kind]):
    """A `Backend` whose workers have keepers. Make it on the event loop that uses it; `close` it."""

    def __init__(self, job: JobSpec, epoch: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes the job and the master's epoch; `clock` dates the events."""
        self.job, self.epoch = job, epoch
        self._clock = clock
        self.links: dict[str, Kind] = {}
        """The keeper of each worker that has one, by worker."""
        self._newest: dict[str, int] = {}
        """The highest incarnation of each worker that was created, or that was asked to end before it was."""
        self._locks: dict[str, asyncio.Lock] = {}
        """Held while a worker is created or ended: what ends it must not overtake what creates it."""
        self._members: dict[str, Member] = {}
        self._events: deque[Event] = deque()
        self._beats: dict[str, WorkerHeartbeat] = {}
        """The latest of each worker that was not taken yet."""
        self._arrived = asyncio.Event()
        self._sources: dict[Event, tuple[Link, int]] = {}
        """The keeper from which each event came that is not acknowledged."""
        self._stale: StaleMasterError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulses = False
        """Whether the keepers are shown life."""

    @abstractmethod
    async def _link_for(self, order: WorkerOrder) -> tuple[Kind, WorkerOrder]:
        """Makes the link to a worker's keeper, which is not started yet; returns it with the order to start it with.

        Raises `BackendError` if the worker has no place.
        """

    # --- orders ---

    async def create(self, order: WorkerOrder) -> None:
        """See `Backend.create`."""
        worker = order.worker
        async with self._lock_of(worker):
            self._raise_if_stale()
            newest = self._newest.get(worker, 0)
            if order.incarnation < newest:
                raise BackendError(f"incarnation {order.incarnation} of {worker} is over; {newest} was here")
            if order.incarnation == newest:  # again
                if self._link(worker, newest) is None:
                    self._put_no_process(worker, newest)
                return
            await self._end_predecessor(worker)
            link, order = await self._link_for(order)
            self._attend(link)
            try:
                await link.start(order, self.epoch, self.job.lease_seconds)
            except (OSError, BackendError) as error:
                link.lose(f"{worker}: {error}")  # `CreateFailed` follows
            if link.is_class and self._members:
                link.send(messages.SEND, message=_news(self._members.values()))

    async def _end_predecessor(self, worker: str) -> None:
        """Kills an earlier incarnation that lives; returns once nothing of it runs."""
        if (earlier := self.links.get(worker)) is None:
            return
        earlier.send(messages.END)
        seconds = PREDECESSOR_SECONDS + LEASES_OF_THE_FENCE * self.job.lease_seconds
        try:
            async with asyncio.timeout(seconds):
                await earlier.gone.wait()
        except TimeoutError:
            raise BackendError(
                f"{worker} cannot be created: its earlier process is not gone within {seconds:g} s"
            ) from None

    async def start(self, worker: str, incarnation: int) -> None:
        """See `Backend.start`."""
        self._order(worker, incarnation, {"kind": messages.START})

    async def check_children(self, worker: str, incarnation: int, check: int, children: Sequence[Member]) -> None:
        """See `Backend.check_children`."""
        order = {"kind": messages.CHECK_CHILDREN, "check": check, "children": [asdict(child) for child in children]}
        self._order(worker, incarnation, order)

    async def failover(self, worker: str, incarnation: int, notice: int, failed: Sequence[Member]) -> None:
        """See `Backend.failover`."""
        order = {"kind": messages.FAILOVER, "notice": notice, "failed": [asdict(member) for member in failed]}
        self._order(worker, incarnation, order)

    def _order(self, worker: str, incarnation: int, order: Mapping[str, Any]) -> None:
        self._raise_if_stale()
        if (link := self._link(worker, incarnation)) is not None:  # else its end was told, or will be
            link.send(messages.SEND, message=order)

    async def publish(self, members: Sequence[Member]) -> None:
        """See `Backend.publish`."""
        self._raise_if_stale()
        self._members |= {member.worker: member for member in members}
        for link in self.links.values():
            link.send(messages.SEND, message=_news(members))

    async def stop(self, worker: str, incarnation: int) -> None:
        """See `Backend.stop`."""
        await self._end_worker(messages.STOP, worker, incarnation)

    async def kill(self, worker: str, incarnation: int) -> None:
        """See `Backend.kill`."""
        await self._end_worker(messages.KILL, worker, incarnation)

    async def _end_worker(self, kind: str, worker: str, incarnation: int) -> None:
        async with self._lock_of(worker):
            self._raise_if_stale()
            if (link := self._link(worker, incarnation)) is not None:
                link.send(kind)
            else:
                self._put_no_process(worker, incarnation)

    def _put_no_process(self, worker: str, incarnation: int) -> None:
        """Tells that there is no such process, and sees to it that there will be none."""
        self._newest[worker] = max(self._newest.get(worker, 0), incarnation)
        self._put(WorkerExited(worker, incarnation, NO_PROCESS, "it has no process", self._clock()))

    def _link(self, worker: str, incarnation: int) -> Kind | None:
        link = self.links.get(worker)
        return link if link is not None and link.incarnation == incarnation else None

    def _lock_of(self, worker: str) -> asyncio.Lock:
        return self._locks.setdefault(worker, asyncio.Lock())

    def _raise_if_stale(self) -> None:
        if self._stale is not None:
            raise self._stale

    # --- events ---

    async def events(self) -> AsyncIterator[Event | WorkerHeartbeat]:
        """See `Backend.events`. Raises `StaleMasterError` once a keeper has obeyed another master."""
        while True:
            self._raise_if_stale()
            if self._events:
                yield self._events.popleft()
            elif self._beats:
                yield self._beats.pop(next(iter(self._beats)))
            else:
                self._arrived.clear()
                await self._arrived.wait()

    async def acknowledge(self, event: Event | WorkerHeartbeat) -> None:
        """See `Backend.acknowledge`."""
        source = None if isinstance(event, WorkerHeartbeat) else self._sources.pop(event, None)
        if source is not None:
            link, number = source
            link.acknowledge(number)

    def _put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    def _take(self, event: Event | WorkerHeartbeat, link: Link, number: int) -> None:
        """Takes what a keeper has told."""
        if isinstance(event, WorkerHeartbeat):
            waiting = self._beats.get(event.worker)
            if waiting is not None and waiting.alive and waiting.incarnation == event.incarnation:
                event = replace(event, alive=True)
            self._beats[event.worker] = event
            self._arrived.set()
        else:
            self._sources[event] = (link, number)
            self._put(event)

    # --- keepers ---

    def _attend(self, link: Kind) -> None:
        """Reads what a keeper tells until nothing of it runs any more."""
        self.links[link.worker] = link
        self._newest[link.worker] = max(link.incarnation, self._newest.get(link.worker, 0))
        if not self._pulses:
            self._pulses = True
            self._begin(self._pulse())
        self._begin(self._read(link))

    async def _read(self, link: Kind) -> None:
        await link.run()
        self._obeys_another(link)
        if self.links.get(link.worker) is link:
            del self.links[link.worker]
        if not (link.ended or link.stale_epoch or link.is_left):
            self._put(link.loss_event())

    def _obeys_another(self, link: Kind) -> bool:
        """Whether a keeper obeys a later master; then this one has to stop."""
        if link.stale_epoch > self.epoch:
            at = f"the {link.owner} of {link.worker} obeys a master of epoch {link.stale_epoch}"
            self._stale = StaleMasterError(f"{at}; this one has epoch {self.epoch}")
            self._arrived.set()
        return link.stale_epoch > self.epoch

    async def _pulse(self) -> None:
        while True:
            for link in list(self.links.values()):
                link.live(self.job.lease_seconds)
            await asyncio.sleep(min(PULSE_SECONDS, self.job.lease_seconds / 8))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something beside the master's calls; what it raises is logged."""

        async def guarded() -> None:
            try:
                await work
            except Exception:
                logger.exception("a task of the backend failed")

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            work.close()  # it may have been cancelled before it began

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(over)

    # --- masters ---

    async def _adopt_links(self, links: Sequence[Kind], seconds: float) -> Sequence[LivingWorker]:
        """Waits so long for what attended keepers of an earlier master have to tell; gives up those that do not answer."""

        async def known(link: Kind) -> None:
            try:
                async with asyncio.timeout(seconds):
                    await link.known.wait()
            except TimeoutError:
                link.give_up()

        await asyncio.gather(*map(known, links))
        self._raise_if_stale()
        return [living for link in links if (living := link.living()) is not None]

    async def close(self, *, end: bool) -> None:
        """See `Backend.close`."""
        try:
            if end:
                self._raise_if_stale()
                await self._end(list(self.links.values()))
        finally:
            for link in list(self.links.values()):
                link.disconnect()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end(self, links: Sequence[Kind]) -> None:
        """Ends keepers, and returns once nothing of them runs."""
        for link in links:
            link.send(messages.END)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await asyncio.gather(*(link.gone.wait() for link in links))
        for link in links:
            link.give_up()
        await asyncio.gather(*(link.gone.wait() for link in links))


def _news(members: Iterable[Member]) -> dict[str, Any]:
    return {"kind": messages.MEMBERS, "members": [asdict(member) for member in members]}
