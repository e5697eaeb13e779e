"""The PrimeMaster's loop: events in, journal, instructions out. Everything that happens to the job arrives in one place.

One pass takes what has arrived, lets the pure manager decide, makes the events durable, and only then has the scheduler carry
the instructions out. The parts have files of their own: `journal`, `mastership`, `scheduler`, `restore`, `queries`;
`counterpoint/cluster/master/main.py` is the process around it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from counterpoint.cluster.backends.base import Backend, Heartbeat
from counterpoint.cluster.clock import JobClock
from counterpoint.cluster.errors import StaleMasterError
from counterpoint.cluster.manager.events import Event, GuestsChanged, Instruction, Outcome, Tick, WorkerExited
from counterpoint.cluster.manager.tally import Tally
from counterpoint.cluster.master.durable import Durable, MastershipLost
from counterpoint.cluster.master.event_codec import fitting
from counterpoint.cluster.master.faults import Faults
from counterpoint.cluster.master.observer import Observer
from counterpoint.cluster.master.orders import Orders
from counterpoint.cluster.master.restore import REPORT_SECONDS, compare, fold, last_time, opening_events, state_of
from counterpoint.cluster.master.scheduler import Scheduler
from counterpoint.sweep.store import Store

logger = logging.getLogger(__name__)

PULSE_SECONDS = 0.5
"""Longest time between two reads of the clock."""

ADOPT_SECONDS, ADOPT_LEASES = 60.0, 3.0
"""Longest time to adopt what lives, and leases that are added: a node that is cut off is waited for until its fence ends."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Something that has arrived at the loop."""

    event: Event
    done: asyncio.Future[None] | None = None
    """What the client that asked for it waits for: it is resolved once the event is durable."""
    from_backend: bool = False
    """Whether the backend is to be told that it is durable."""


class MasterTerm:
    """One term of a master: from its opening of the journal to the job's end, or until it loses the mastership."""

    def __init__(
        self,
        orders: Orders,
        store: Store,
        backend: Backend,
        epoch: int,
        is_lost: Callable[[], str | None] = lambda: None,
        faults: Faults | None = None,
        observer: Observer | None = None,
        *,
        writes: bool = True,
    ) -> None:
        """Takes what the job is, where its journal lies, and a backend that acts in the name of the `epoch`.

        `is_lost` returns why this master may not act any more; None while it may. Without `writes` nothing is journalled: for
        the end of a job whose storage fails.
        """
        self.spec, self.epoch, self.backend = orders.spec, epoch, backend
        self._orders = orders
        self.beats: dict[str, Heartbeat] = {}
        """The last heartbeat of each worker, for display."""
        self.exits: dict[str, WorkerExited] = {}
        """The ends of processes that are not decided on yet, for display."""
        self.faults = faults or Faults("")
        self.durable = Durable(store, epoch, self._check_lost, self.faults, self._report_trouble, writes=writes)
        self._is_lost = is_lost
        self._observer = observer or Observer()
        self._looked_for_guests = -math.inf
        self._inbox: asyncio.Queue[Arrival | None] = asyncio.Queue()
        self._lost: str | None = None
        self._failure: Exception | None = None

    def lose(self, reason: str) -> None:
        """Ends the loop before it acts again. Call it on the loop."""
        self._lost = self._lost or reason
        self._inbox.put_nowait(None)

    @property
    def is_ready(self) -> bool:
        """Whether it has restored the job's state from the journal."""
        return hasattr(self, "manager")

    async def request(self, event: Event) -> None:
        """Passes a client's request on, and returns once it is durable. Its time is set here."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(Arrival(event, done))
        await done

    async def run(self, stop_first: Event | None = None) -> Outcome:
        """Runs the job to its end. `stop_first` is handled before anything that happens from now on.

        Raises `MastershipLost`; `CapacityError` before anything was started; and what the manager, the backend or a damaged
        journal raises.
        """
        try:
            instructions = await self._startup()
            reader = asyncio.create_task(self._read_backend(), name="the backend's events")
            try:
                if stop_first is not None:
                    self.emit(stop_first)
                self._scheduler.submit(instructions)
                return await self._main_loop()
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
                await self._scheduler.cleanup()
        except StaleMasterError as error:
            raise MastershipLost(str(error)) from error
        finally:
            await self.durable.close()

    # --- startup ---

    async def _startup(self) -> list[Instruction]:
        """Opens the journal, restores the state, and adopts what lives; returns what is to be done first."""
        history = await self.durable.open(lambda read: opening_events(read, self.epoch))
        self.manager, instructions = fold(self.spec, history)
        self.tally = Tally(self.manager)
        self.clock = JobClock(last_time(history))
        self._scheduler = Scheduler(self._orders, self.backend, self.manager, self.emit, self.fail, self.faults)
        self._check_lost()
        if history.last == 1:
            bundles = [self._orders.bundle(record) for record in self.manager.state.bundles.values()]
            await self.backend.check_capacity(bundles)
        async with asyncio.timeout(ADOPT_SECONDS + ADOPT_LEASES * self.spec.lease_seconds):
            living = await self.backend.adopt(history.handles)
            nodes = {node.name for node in await self.backend.nodes() if node.alive}
        found = compare(self.manager.state, living, nodes)
        for event in found.news:
            self.emit(event)
        if found.missing:
            asyncio.get_running_loop().call_later(REPORT_SECONDS, self._emit_all, found.missing)
        return [*found.strays, *instructions]

    def _emit_all(self, events: Sequence[Event]) -> None:
        for event in events:
            self.emit(event)

    # --- the loop ---

    async def _main_loop(self) -> Outcome:
        while (outcome := self.manager.outcome) is None:
            self._check_lost()
            if self._failure is not None:
                raise self._failure
            await self._one_pass(await self._arrivals())
        return outcome

    async def _arrivals(self) -> list[Arrival]:
        """Waits for events, at most until the next deadline, and returns all that are there."""
        due = [at for at in (self.manager.deadline, self.tally.deadline) if at is not None]
        wait = min([PULSE_SECONDS, *(max(0.0, at - self.clock.read()) for at in due)])
        arrived: list[Arrival | None] = []
        try:
            async with asyncio.timeout(wait):
                arrived.append(await self._inbox.get())
        except TimeoutError:
            pass  # A deadline may have passed.
        while not self._inbox.empty():
            arrived.append(self._inbox.get_nowait())
        now = self.clock.read()
        found = [arrival for arrival in arrived if arrival is not None]
        found = [*await self._new_guests(found, now), *found]
        found += [Arrival(event) for event in self.tally.missed(now)]
        if self.manager.deadline is not None and self.manager.deadline <= now:
            found.append(Arrival(Tick(now)))
        return found

    async def _new_guests(self, arrived: Sequence[Arrival], now: float) -> list[Arrival]:
        """Looks for guests now and then, and before the end of a worker is handled."""
        exited = any(isinstance(arrival.event, WorkerExited) for arrival in arrived)
        if not exited and now - self._looked_for_guests < PULSE_SECONDS:
            return []
        self._looked_for_guests = now
        guests = await self._observer.guests()
        if guests is None or list(guests) == self.manager.state.guests:
            return []
        return [Arrival(GuestsChanged(tuple(guests), 0.0))]

    def _show(self) -> None:
        self._observer.changed(
            self.manager, self.beats, self.exits, lambda worker: self.tally.silent_for(worker, self.clock.read())
        )

    def _report_trouble(self, trouble: str) -> None:
        self._observer.troubled(trouble)
        if self.is_ready:
            self._show()

    async def _one_pass(self, arrived: list[Arrival]) -> None:
        """Decides on events, makes them durable, and begins what follows from them."""
        now = self.clock.read()
        events: list[Event] = []
        instructions: list[Instruction] = []
        for event in dict.fromkeys(self._fitting(arrival, now) for arrival in arrived):
            if event is None:
                continue
            if self.tally.passes(event):
                events.append(event)
                instructions += self.manager.handle(event)
        changes = self.manager.take_changes()
        for change in changes:
            self.tally.follow(change.worker, now)
        await self.durable.append(events, self.backend.handles())
        self._check_lost()
        for arrival in arrived:
            if isinstance(arrival.event, WorkerExited) and self.exits.get(arrival.event.worker) is arrival.event:
                del self.exits[arrival.event.worker]
            if arrival.from_backend:
                await self.backend.acknowledge(arrival.event)
            if arrival.done is not None and not arrival.done.done():
                arrival.done.set_result(None)
        self._show()
        self._scheduler.publish(changes)
        self._scheduler.submit(instructions)
        self.durable.consider_snapshot(lambda: state_of(self.manager, now))

    def _fitting(self, arrival: Arrival, now: float) -> Event | None:
        """Returns an event as it can be journalled, with its time; None if it cannot be, which whoever asked for it is told."""
        try:
            return fitting(replace(arrival.event, at=now))
        except ValueError as error:
            logger.error("an event is dropped: %s", error)
            if arrival.done is not None and not arrival.done.done():
                arrival.done.set_exception(error)
            return None

    async def _read_backend(self) -> None:
        """Lets the backend's events arrive. Heartbeats are counted at once, and never journalled."""
        try:
            async for event in self.backend.events():
                if isinstance(event, Heartbeat):
                    self.beats[event.worker] = event
                    if event.alive:
                        self.tally.heard(event.worker, event.incarnation, self.clock.read())
                    self._show()
                else:
                    self._inbox.put_nowait(Arrival(event, from_backend=True))
                    if isinstance(event, WorkerExited):
                        self.exits[event.worker] = event
                        if self.durable.trouble:
                            self._show()
            raise RuntimeError("the backend's events have ended")
        except Exception as error:  # noqa: BLE001 - raised by the loop
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends the loop with an error, before it acts again. Call it on the loop."""
        self._failure = self._failure or error
        self._inbox.put_nowait(None)

    def emit(self, event: Event) -> None:
        """Lets an event of this process arrive. Its time is set here."""
        self._inbox.put_nowait(Arrival(event))

    def _check_lost(self) -> None:
        """Raises `MastershipLost` unless this master may act."""
        if (reason := self._lost or self._is_lost()) is not None:
            raise MastershipLost(reason)
