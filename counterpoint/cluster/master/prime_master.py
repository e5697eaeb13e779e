"""The PrimeMaster's loop: events in, state, instructions out. Everything that happens to the job arrives in one place.

One pass takes what has arrived, lets the pure manager decide, makes the state durable, and only then has the scheduler carry
the instructions out. The parts have files of their own: `state_writer`, `scheduler`, `restore`, `queries`;
`counterpoint/cluster/master/main.py` is the process around it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from counterpoint.cluster.backends.base import Backend, WorkerHeartbeat
from counterpoint.cluster.clock import JobClock
from counterpoint.cluster.manager.events import (
    LONGEST_REASON,
    BeginJob,
    Event,
    GuestsChanged,
    Instruction,
    MasterChanged,
    Outcome,
    Tick,
    WorkerExited,
    WorkerSilent,
)
from counterpoint.cluster.manager.manager import PrimeManager
from counterpoint.cluster.manager.tally import Tally
from counterpoint.cluster.master.faults import Faults
from counterpoint.cluster.master.orders import Orders
from counterpoint.cluster.master.restore import REPORT_SECONDS, compare
from counterpoint.cluster.master.scheduler import Scheduler
from counterpoint.cluster.master.state_writer import StateWriter
from counterpoint.cluster.member import Member
from counterpoint.cluster.state_file import ChangeLog
from counterpoint.transport.typed import met

logger = logging.getLogger(__name__)

PULSE_SECONDS = 0.5
"""Longest time between two reads of the clock."""

ADOPT_SECONDS, ADOPT_LEASES = 60.0, 3.0
"""Longest time to adopt what lives, and leases that are added: a node that is cut off is waited for until its fence ends."""


MAX_EVENT_BYTES = 64 * 2**10
"""The size of one event as JSON."""

CUT = " ... (cut)"


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Something that has arrived at the loop."""

    event: Event
    done: asyncio.Future[None] | None = None
    """What the client that asked for it waits for: it is resolved once the event is durable."""
    from_backend: bool = False
    """Whether the backend is to be told that it is durable."""


class MasterObserver:
    """What a process that runs a master adds to it. This one sees nothing, and knows of no guests.

    An exception of an observer ends its master's term: catch your own.
    """

    def changed(self, term: MasterTerm) -> None:
        """Called on the loop after events, before what follows from them is done; and after each heartbeat."""

    def troubled(self, trouble: str) -> None:
        """Called on the loop with the reason why the state cannot be written, once, and with "" when it can again."""
        if trouble:
            logger.error("%s; the workers go on", trouble)
        else:
            logger.warning("the job's state can be written again: the job goes on")

    async def guests(self) -> Sequence[str] | None:
        """Returns the job's guests; None if they are not known.

        Awaited by the loop about twice a second, and before the end of a worker is handled: the services go on for a guest that
        came before the last task ended.
        """
        return None


class MasterTerm:
    """One term of a master: from its first write of the state to the job's end, or until another master has taken over."""

    def __init__(
        self,
        orders: Orders,
        state: StateWriter,
        backend: Backend,
        epoch: int,
        faults: Faults | None = None,
        observer: MasterObserver | None = None,
    ) -> None:
        """Takes what the job is, its state, which was read, and a backend that acts in the name of the `epoch`."""
        self.spec, self.epoch, self.backend, self.state = orders.spec, epoch, backend, state
        self._orders = orders
        self.beats: dict[str, WorkerHeartbeat] = {}
        """The last heartbeat of each worker, for display."""
        self.exits: dict[str, WorkerExited] = {}
        """The ends of processes that are not decided on yet, as while the state cannot be written; for display."""
        self.faults = faults or Faults("")
        self._observer = observer or MasterObserver()
        self.on_begun: Callable[[int], object] = lambda epoch: None
        """Called with the epoch once the state says that this is the master."""
        state.report = self._report_trouble
        self._looked_for_guests = -math.inf
        self._inbox: asyncio.Queue[_Arrival | None] = asyncio.Queue()
        self._changed: dict[str, Member] = {}
        """Workers that have changed since the last pass."""
        self._failure: Exception | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it has read the job's state."""
        return hasattr(self, "manager")

    async def request(self, event: Event) -> None:
        """Passes a client's request on, and returns once it is durable. Its time is set here."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(_Arrival(event, done))
        await done

    async def run(self, stop_first: Event | None = None) -> Outcome:
        """Runs the job to its end. `stop_first` is handled before anything that happens from now on.

        Raises `StaleMasterError` once another master has taken over; `NotWritten`; `CapacityError` before anything was started;
        and what the manager or the backend raises.
        """
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

    # --- startup ---

    async def _startup(self) -> list[Instruction]:
        """Restores the state, writes it with this epoch, and adopts what lives; returns what is to be done first."""
        saved = self.state.saved
        at, handles = (0.0, {}) if saved is None else (saved.at, saved.handles)
        manager = PrimeManager(self.spec, None if saved is None else saved.job.to_dict())
        self._log = ChangeLog(manager.state, () if saved is None else saved.changes)
        self.tally = Tally(manager)
        self.clock = JobClock(at)
        self.manager = manager
        self._scheduler = Scheduler(self._orders, self.backend, manager, self.emit, self.fail, self.faults)
        opening: list[Event] = [MasterChanged(self.epoch, at), *([BeginJob(at)] if saved is None else [])]
        instructions = [each for event in opening for each in self._decide(event)]
        await self._write(at, handles)
        self.on_begun(self.epoch)
        if saved is None:
            bundles = [self._orders.bundle(record) for record in manager.state.bundles.values()]
            await self.backend.check_capacity(bundles)
        async with asyncio.timeout(ADOPT_SECONDS + ADOPT_LEASES * self.spec.lease_seconds):
            living = await self.backend.adopt(handles)
            nodes = {node.name for node in await self.backend.nodes() if node.alive}
        found = compare(manager.state, living, nodes)
        for event in found.news:
            self.emit(event)
        if found.missing:
            asyncio.get_running_loop().call_later(REPORT_SECONDS, self._emit_all, found.missing)
        return [*found.strays, *instructions]

    def _decide(self, event: Event) -> list[Instruction]:
        """Has the manager decide about an event, and notes what has changed."""
        instructions = self.manager.handle(event)
        changed = {one.worker: one for one in self.manager.take_changes()}
        self._changed |= changed
        self._log.note(changed, in_words(event), getattr(event, "reason", ""), time.time())
        return instructions

    async def _write(self, at: float, handles: Mapping[str, Any]) -> None:
        await self.state.write(self.epoch, at, self.manager.state, handles, self._log.changes)

    def _emit_all(self, events: Sequence[Event]) -> None:
        for event in events:
            self.emit(event)

    # --- the loop ---

    async def _main_loop(self) -> Outcome:
        while (outcome := self.manager.outcome) is None:
            if self._failure is not None:
                raise self._failure
            await self._one_pass(await self._arrivals())
        return outcome

    async def _arrivals(self) -> list[_Arrival]:
        """Waits for events, at most until the next deadline, and returns all that are there."""
        due = [at for at in (self.manager.deadline, self.tally.deadline) if at is not None]
        wait = min([PULSE_SECONDS, *(max(0.0, at - self.clock.read()) for at in due)])
        arrived: list[_Arrival | None] = []
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
        found += [_Arrival(event) for event in self.tally.missed(now)]
        if self.manager.deadline is not None and self.manager.deadline <= now:
            found.append(_Arrival(Tick(now)))
        return found

    async def _new_guests(self, arrived: Sequence[_Arrival], now: float) -> list[_Arrival]:
        """Looks for guests now and then, and before the end of a worker is handled."""
        exited = any(isinstance(arrival.event, WorkerExited) for arrival in arrived)
        if not exited and now - self._looked_for_guests < PULSE_SECONDS:
            return []
        self._looked_for_guests = now
        guests = await self._observer.guests()
        if guests is None or list(guests) == self.manager.state.guests:
            return []
        return [_Arrival(GuestsChanged(tuple(guests), 0.0))]

    def silent_for(self, worker: str) -> float:
        """Returns how many seconds ago the worker's last heartbeat was; 0 for one that is not listened for."""
        return self.tally.silent_for(worker, self.clock.read())

    def _report_trouble(self, trouble: str) -> None:
        self._observer.troubled(trouble)
        if self.is_ready:
            self._observer.changed(self)

    async def _one_pass(self, arrived: list[_Arrival]) -> None:
        """Decides on events, makes the state durable, and begins what follows from it."""
        now, handles = self.clock.read(), self.backend.handles()
        instructions: list[Instruction] = []
        is_new = handles != self.state.handles
        for event in dict.fromkeys(self._fitting(arrival, now) for arrival in arrived):
            if event is not None and self.tally.passes(event):
                is_new = True
                instructions += self._decide(event)
        changes = list(self._changed.values())
        self._changed.clear()
        for change in changes:
            self.tally.follow(change.worker, now)
        if is_new:
            await self._write(now, handles)
        for arrival in arrived:
            if isinstance(arrival.event, WorkerExited) and self.exits.get(arrival.event.worker) is arrival.event:
                del self.exits[arrival.event.worker]
            if arrival.from_backend:
                await self.backend.acknowledge(arrival.event)
            if arrival.done is not None and not arrival.done.done():
                arrival.done.set_result(None)
        self._observer.changed(self)
        self._scheduler.publish(changes)
        self._scheduler.submit(instructions)

    def _fitting(self, arrival: _Arrival, now: float) -> Event | None:
        """Returns an event as the state can hold it, with its time; None if it cannot, which whoever asked for it is told."""
        try:
            return fitting(replace(arrival.event, at=now))
        except ValueError as error:
            logger.error("an event is dropped: %s", error)
            if arrival.done is not None and not arrival.done.done():
                arrival.done.set_exception(error)
            return None

    async def _read_backend(self) -> None:
        """Lets the backend's events arrive. Heartbeats are counted at once, and are in no state."""
        try:
            async for event in self.backend.events():
                if isinstance(event, WorkerHeartbeat):
                    self.beats[event.worker] = event
                    if event.alive:
                        self.tally.heard(event.worker, event.incarnation, self.clock.read())
                    self._observer.changed(self)
                else:
                    self._inbox.put_nowait(_Arrival(event, from_backend=True))
                    if isinstance(event, WorkerExited):
                        self.exits[event.worker] = event
                        if self.state.trouble:
                            self._observer.changed(self)
            raise RuntimeError("the backend's events have ended")
        except Exception as error:  # noqa: BLE001 - raised by the loop
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends the loop with an error, before it acts again. Call it on the loop."""
        self._failure = self._failure or error
        self._inbox.put_nowait(None)

    def emit(self, event: Event) -> None:
        """Lets an event of this process arrive. Its time is set here."""
        self._inbox.put_nowait(_Arrival(event))


def in_words(event: Event) -> str:
    """Returns the kind of an event in words: of a `WorkerExited`, `worker exited`."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", type(event).__name__).lower()


def fitting(event: Event) -> Event:
    """Returns the event as a state can hold its values: with a reason that is not too long, and is text.

    One that is too large all the same, or would not come back from JSON as it is, is replaced by the failure of its cause: the
    worker that it is about, or from, counts as silent and is created again. Raises `ValueError` if it is of no worker.
    """
    reason = getattr(event, "reason", "")
    if isinstance(reason, str) and (len(reason) > LONGEST_REASON or not reason.isascii()):
        text = reason.encode(errors="replace").decode()
        mended: Any = {"reason": text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - len(CUT)] + CUT}
        event = replace(event, **mended)
    if not (wrong := _misfit(event)):
        return event
    worker, incarnation = getattr(event, "worker", None), getattr(event, "incarnation", None)
    if worker is None or incarnation is None:
        raise ValueError(wrong)
    silent = WorkerSilent(worker, incarnation, 0.0, event.at)
    if _misfit(silent):
        raise ValueError(wrong)
    logger.error("%s counts as silent: %s", worker, wrong)
    return silent


def _misfit(event: Event) -> str:
    """Returns why the values of an event do not come back from JSON as they are; empty if they do."""
    name = type(event).__name__
    try:
        data = msgspec.json.encode(event)
        if len(data) > MAX_EVENT_BYTES:
            return f"{name} has {len(data)} bytes as JSON; an event may have {MAX_EVENT_BYTES}"
        msgspec.json.decode(data, type=met(type(event)))
    except (ValueError, TypeError) as error:  # of what JSON does not have, and of a field with a value of another type
        return f"{name} cannot be written: {str(error)[:200]}"
    return ""
