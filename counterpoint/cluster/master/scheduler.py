"""Carries the manager's instructions out on a backend: many at once, those for one worker in order, each with a deadline.

Nothing is raised to the loop. What fails becomes the event that the manager expects for it (`CreateFailed`,
`AllocationFailed`), or, for a living worker that does not get its orders, `WorkerSilent`; the manager then decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from counterpoint.cluster.backends.base import Backend
from counterpoint.cluster.errors import CapacityError, StaleMasterError
from counterpoint.cluster.manager import events
from counterpoint.cluster.manager.events import Event, Instruction
from counterpoint.cluster.manager.manager import PrimeManager, member
from counterpoint.cluster.manager.state import CREATIONS_AT_ONCE, Phase, PlacementState, WorkerRecord
from counterpoint.cluster.master.faults import Faults
from counterpoint.cluster.master.orders import Orders
from counterpoint.cluster.member import Member

logger = logging.getLogger(__name__)

ALLOCATE_SECONDS = 120.0
CREATE_SECONDS = 180.0
ORDER_SECONDS = 15.0
"""Longest time for an instruction of each kind to be accepted; what follows from it comes as an event. A backend's own
deadlines are shorter, together: on Ray, a keeper's start, its first answer, and the order to it."""

TRIES = 4
"""How often an order to a living worker is tried before the worker counts as silent."""

PAUSE_SECONDS = 1.0
"""Seconds between two tries."""

HELD = (PlacementState.ALLOCATING, PlacementState.ALLOCATED)
"""A place that the backend has reserved, or may have."""

NEWS_SECONDS = 5.0
"""Longest wait of a `start` for the news of members to arrive everywhere. A worker can be told late, but not never."""


class Scheduler:
    """Allocates places, creates workers, and passes orders on to them: the instructions under way.

    Made by the loop, which passes on the events that `emit` is called with.
    """

    def __init__(
        self,
        orders: Orders,
        backend: Backend,
        manager: PrimeManager,
        emit: Callable[[Event], None],
        fail: Callable[[Exception], None],
        faults: Faults,
    ) -> None:
        self._orders = orders
        self._backend = backend
        self._manager = manager
        self._emit = emit
        self._fail = fail
        self._faults = faults
        self._unpublished: dict[str, Member] = {}
        self._published = asyncio.Event()
        """Set while there is no news of members that has not arrived."""
        self._published.set()
        self._creations = asyncio.Semaphore(CREATIONS_AT_ONCE)
        self._lanes: dict[str, deque[Instruction]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, instructions: Sequence[Instruction]) -> None:
        """Begins instructions, which follow from a state that is durable."""
        for instruction in instructions:
            lane = (
                instruction.bundle if isinstance(instruction, events.Allocate | events.Release) else instruction.worker
            )
            if lane in self._lanes:
                self._lanes[lane].append(instruction)
                continue
            self._lanes[lane] = deque([instruction])
            self._begin(self._run(lane), f"instructions for {lane}")

    def publish(self, members: Sequence[Member]) -> None:
        """Sends changed members to every worker, as soon as what was sent before has arrived."""
        idle = not self._unpublished
        self._unpublished |= {one.worker: one for one in members}
        if idle and self._unpublished:
            self._published.clear()
            self._begin(self._publish(), "members")

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(self._guarded(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Passes what stops the master on to its loop."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - raised by the loop
            self._fail(error)

    async def _publish(self) -> None:
        while self._unpublished:
            members = list(self._unpublished.values())
            try:
                async with asyncio.timeout(ORDER_SECONDS):
                    await self._backend.publish(members)
            except StaleMasterError:
                raise
            except Exception as error:  # noqa: BLE001 - a backend of the user's may raise anything; sent again
                logger.warning("news of %d workers did not reach all: %s", len(members), _in_words(error))
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            for one in members:
                if self._unpublished[one.worker] is one:
                    del self._unpublished[one.worker]
        self._published.set()

    async def cleanup(self) -> None:
        """Gives up what is under way. If the job has ended, also gives back places that are still held, with what is in them.

        Workers were stopped before, in order, by the manager's instructions.
        """
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._manager.outcome is None:
            return  # another master goes on with the job
        held = [name for name, each in self._manager.state.bundles.items() if each.place in HELD]
        for bundle in held:
            try:
                async with asyncio.timeout(ORDER_SECONDS):
                    await self._backend.release(bundle)
            except Exception as error:  # noqa: BLE001 - as above; the backend's own end follows
                logger.warning("the place of %s was not given back: %s", bundle, _in_words(error))

    async def _run(self, name: str) -> None:
        lane = self._lanes[name]
        while lane:
            instruction = lane[0]
            self._faults.reach("before_instruction")
            await self._execute(instruction, lane)
            self._faults.reach("after_instruction")
            lane.popleft()
        del self._lanes[name]

    async def _execute(self, instruction: Instruction, lane: deque[Instruction]) -> None:
        match instruction:
            case events.Allocate():
                await self.allocate_placement_group(instruction)
            case events.Create():
                await self.create_actors([instruction])
            case events.Start():  # after the news of its peers, or its first calls would find them unready
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(NEWS_SECONDS):
                        await self._published.wait()
                await self._order(instruction, lane)
            case _:
                await self._order(instruction, lane)

    async def allocate_placement_group(self, instruction: events.Allocate) -> None:
        """Finds a place for one bundle, all or none; `Allocated` or `AllocationFailed` is emitted."""
        bundle, attempt = instruction.bundle, instruction.attempt
        record = self._manager.state.bundles[bundle]
        try:
            async with asyncio.timeout(ALLOCATE_SECONDS):
                await self._backend.allocate(self._orders.bundle(record), instruction.avoid)
        except StaleMasterError:
            raise
        except CapacityError as error:
            self._emit(events.AllocationFailed(bundle, attempt, str(error), True, 0.0))
        except TimeoutError:
            why = f"no place for bundle {bundle} was found within {ALLOCATE_SECONDS:g} s"
            self._emit(events.AllocationFailed(bundle, attempt, why, False, 0.0))
        except Exception as error:  # noqa: BLE001 - a backend of the user's may raise anything; the manager decides
            self._emit(events.AllocationFailed(bundle, attempt, _in_words(error), False, 0.0))
        else:
            self._emit(events.Allocated(bundle, attempt, "", 0.0))

    async def create_actors(self, instructions: Sequence[events.Create]) -> None:
        """Has the workers' processes started, in their bundles' places; `Created` or `CreateFailed` follows for each."""
        await asyncio.gather(*(self._create(each) for each in instructions))

    create_nodes = create_actors
    """The same by the other name of document 003."""

    async def _create(self, instruction: events.Create) -> None:
        worker, incarnation = instruction.worker, instruction.incarnation
        lane = self._lanes.get(worker, ())
        record = self._manager.state.workers[worker]
        try:
            order = self._orders.order(record, incarnation, instruction.again, self._count(record))
            async with self._creations:
                if not instruction.again and any(isinstance(later, events.StopWorker | events.Kill) for later in lane):
                    reason = "it is to end, and its turn had not come"
                    return self._emit(events.CreateFailed(worker, incarnation, reason, 0.0))
                async with asyncio.timeout(CREATE_SECONDS):
                    return await self._backend.create(order)
        except StaleMasterError:
            raise
        except TimeoutError:
            reason = f"{worker} was not created within {CREATE_SECONDS:g} s"
        except Exception as error:  # noqa: BLE001 - as above
            reason = _in_words(error)
        # It may have been created all the same: the next incarnation must not run beside it.
        await self._order(events.Kill(worker, incarnation), deque())
        self._emit(events.CreateFailed(worker, incarnation, reason, 0.0))

    async def _order(self, instruction: Instruction, lane: deque[Instruction]) -> None:
        """Carries out what is for a living worker, or gives a place back; tries it again while nothing newer is to be done."""
        for attempt in range(1, TRIES + 1):
            try:
                async with asyncio.timeout(ORDER_SECONDS):
                    return await self._call(instruction)
            except StaleMasterError:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                logger.warning("%s failed, attempt %d of %d: %s", instruction, attempt, TRIES, _in_words(error))
            if len(lane) > 1:
                return
            await asyncio.sleep(PAUSE_SECONDS)
        if isinstance(instruction, events.Start | events.CheckChildren | events.Failover):
            self._emit(events.WorkerSilent(instruction.worker, instruction.incarnation, TRIES * PAUSE_SECONDS, 0.0))

    async def _call(self, instruction: Instruction) -> None:
        backend = self._backend
        match instruction:
            case events.CheckChildren(worker, incarnation, check):
                role = self._manager.state.workers[worker].role
                await backend.check_children(worker, incarnation, check, self._children(role))
            case events.Start(worker, incarnation):
                await backend.start(worker, incarnation)
            case events.Failover(worker, incarnation, notice, failed):
                await backend.failover(worker, incarnation, notice, self._members(failed))
            case events.StopWorker(worker, incarnation):
                await backend.stop(worker, incarnation)
            case events.Kill(worker, incarnation):
                await backend.kill(worker, incarnation)
            case events.Release(bundle):
                await backend.release(bundle)

    def _children(self, role: str) -> list[Member]:
        """The workers of a role, by rank, without its SubMaster and those that were removed."""
        records = sorted(self._workers_of(role), key=lambda record: record.rank)
        return self._members([record.name for record in records])

    def _count(self, record: WorkerRecord) -> int:
        return self._manager.state.roles[record.role].wanted

    def _workers_of(self, role: str) -> list[WorkerRecord]:
        workers = self._manager.state.workers.values()
        return [one for one in workers if one.role == role and one.rank >= 0 and one.phase is not Phase.REMOVED]

    def _members(self, names: Sequence[str]) -> list[Member]:
        return [member(self._manager.state, name) for name in names if name in self._manager.state.workers]


def _in_words(error: Exception) -> str:
    return str(error) if str(error) else repr(error)
