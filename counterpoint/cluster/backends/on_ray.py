"""The backend for a Ray cluster: a placement group for each bundle, and in it a detached actor for each worker.

Ray places, starts processes on other machines, passes orders on, and tells of dead nodes and actors; what an actor does is in
`counterpoint/cluster/backends/ray_actor.py`. Nothing of a job is Ray's to restart. The master's own connection may go: actors and
placement groups are detached, and the next master finds them by their names (`counterpoint/cluster/backends/ray_places.py`).

Ray's word that an actor is dead says nothing of what ran below it, and `ray.kill` gives it at once: a process that is stopped
lives on for five seconds. So the end of a worker is told only once its node has shown that nothing of it is left, or once two
leases are over, after which nothing there can run any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from counterpoint.cluster.backends.base import Backend, Bundle, Heartbeat, Node
from counterpoint.cluster.backends.capacity import require_capacity, require_place
from counterpoint.cluster.backends.order import LivingWorker, WorkerOrder
from counterpoint.cluster.backends.ray_actor import LEASES_OF_THE_FENCE
from counterpoint.cluster.backends.ray_cluster import RayCluster
from counterpoint.cluster.backends.ray_places import ActorName, group_name, job_key
from counterpoint.cluster.backends.ray_threads import in_thread
from counterpoint.cluster.backends.reports import event_of
from counterpoint.cluster.clock import RunningClock
from counterpoint.cluster.errors import BackendError, StaleMasterError
from counterpoint.cluster.manager.events import Created, CreateFailed, Event, NodeLost, WorkerExited
from counterpoint.cluster.member import Member
from counterpoint.cluster.spec import MASTER, JobSpec, Resources, role_of
from counterpoint.transport.process.keeper import messages

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0
CALL_SECONDS = 30.0
PLACE_SECONDS = 10.0
"""How long a bundle waits for a place before the manager is told that there is none now."""

START_SECONDS = 90.0
"""Longest time from the creation of an actor to its first answer."""

ADOPT_SECONDS = 20.0
"""Longest time for an actor of an earlier master to answer."""

UNREACHABLE_SECONDS = 30.0
"""Nothing is placed for so long on a node that could not show that nothing of a worker is left there. Ray itself takes about as
long to give a node up."""

LEAST_SILENCE_SECONDS = 3.0
"""An actor on a busy machine may be late for so long, however short the lease."""

POLL_SECONDS = 1.0
"""Seconds between two looks at Ray's nodes."""

PULSE_SECONDS = 0.5
"""Seconds between two looks at the clock while an actor's answer is waited for."""

END_SECONDS = 10.0
"""How long a killed worker may take to end before its actor is removed."""

NO_PROCESS = 128 + 9
"""Exit code of a worker whose process is not known, or no more."""

_PLACED = "bundle of "
"""How a handle that names a worker's bundle begins; the worker follows."""

Key = tuple[str, int]
"""A worker and its incarnation."""


@dataclass(slots=True, eq=False)
class Hosted:
    """A worker's actor, as this master has it."""

    name: ActorName
    handle: Any
    lost: asyncio.Future[str]
    """Why it is given up."""
    node: str = ""
    is_up: bool = False
    """Whether it has answered."""
    created: bool = False
    received: int = 0
    """The number of its last report."""
    unacknowledged: dict[int, bool] = field(default_factory=dict)
    """The numbers of received reports: whether each may be acknowledged."""
    acknowledged: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once nothing of the worker runs any more, and its end is among the events."""

    def lose(self, reason: str) -> None:
        """Gives it up."""
        if not self.lost.done():
            self.lost.set_result(reason)

    def acknowledge(self, number: int) -> None:
        """Notes that a report need not be repeated, which the actor is told once that is true of all before it, too."""
        self.unacknowledged[number] = True
        for earlier, may in sorted(self.unacknowledged.items()):
            if not may:
                break
            del self.unacknowledged[earlier]
            self.acknowledged = earlier


class RayBackend(Backend):
    """The backend. Make it on the event loop that uses it; `close` it."""

    def __init__(
        self,
        job: JobSpec,
        directory: Path,
        epoch: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        address: str = "",
    ) -> None:
        """Takes the job, the master's epoch, and Ray's address; without it, `$RAY_ADDRESS` has it. `clock` dates the events."""
        self.job, self.directory, self.epoch = job, directory, epoch
        self._clock = clock
        self._ray = RayCluster(address)
        self._key = job_key(job.name, directory)
        self._silence = max(job.lease_seconds / 2, LEAST_SILENCE_SECONDS)
        self._hosted: dict[Key, Hosted] = {}
        """The actors whose worker's end was not told yet."""
        self._highest: dict[str, int] = {}
        """The highest incarnation of each worker that was created, or was to end before it was."""
        self._locks: dict[str, asyncio.Lock] = {}
        """Held while a worker is created or ended: what ends it must not overtake what creates it."""
        self._bundles: dict[str, Bundle] = {}
        """Those that were placed."""
        self._members: dict[str, Member] = {}
        self._unreachable: dict[str, float] = {}
        """Nodes that did not answer: until when nothing is placed there, by `time.monotonic`."""
        self._events: deque[Event] = deque()
        self._beats: dict[str, Heartbeat] = {}
        """The latest of each worker that was not taken yet."""
        self._arrived = asyncio.Event()
        self._sources: dict[Event, tuple[Hosted, int]] = {}
        """The actor from which each event came that is not acknowledged."""
        self._stale: StaleMasterError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._connecting = asyncio.Lock()
        self._connected = False

    # --- places ---

    async def check_capacity(self, bundles: Sequence[Bundle]) -> None:
        """See `Backend.check_capacity`."""
        require_capacity(bundles, await self.nodes())

    async def allocate(self, bundle: Bundle, avoid: Sequence[str]) -> None:
        """See `Backend.allocate`."""
        require_place(bundle, [node for node in await self.nodes() if node.name not in avoid])
        await self._reserve(bundle, avoid)
        self._bundles[bundle.name] = bundle

    async def _reserve(self, bundle: Bundle, avoid: Sequence[str]) -> None:
        await self._call(
            f"placing bundle {bundle.name}",
            self._ray.reserve,
            group_name(self._key, bundle.name),
            list(bundle.needs.values()),
            [*avoid, *(node for node, until in self._unreachable.items() if time.monotonic() < until)],
            PLACE_SECONDS,
            seconds=PLACE_SECONDS + CALL_SECONDS,
        )

    async def release(self, bundle: str) -> None:
        """See `Backend.release`."""
        self._raise_if_stale()
        await asyncio.gather(*(self._end(one) for one in list(self._hosted.values()) if one.name.bundle == bundle))
        self._bundles.pop(bundle, None)
        await self._call(f"releasing bundle {bundle}", self._ray.remove_group, group_name(self._key, bundle))

    async def nodes(self) -> Sequence[Node]:
        """See `Backend.nodes`."""
        nodes: list[Node] = await self._call("listing the nodes", self._ray.nodes)
        return nodes

    # --- orders ---

    async def create(self, order: WorkerOrder) -> None:
        """See `Backend.create`."""
        worker, key = order.worker, (order.worker, order.incarnation)
        async with self._lock_of(worker):
            self._raise_if_stale()
            if key in self._hosted:
                return
            if order.incarnation <= self._highest.get(worker, 0):
                self._tell_no_process(key)
                return
            await asyncio.gather(*(self._end(one) for one in list(self._hosted.values()) if one.name.worker == worker))
            self._highest[worker] = order.incarnation
            if order.bundle in self._bundles:  # actors that had no master for a while may have removed it
                await self._reserve(self._bundles[order.bundle], ())
            name = ActorName(self._key, order.bundle, worker, order.incarnation)
            group, needs = group_name(self._key, order.bundle), self._needs_of(worker)
            what = f"creating actor {name}"
            handle = await self._call(what, self._ray.start_actor, str(name), group, needs, self.job.lease_seconds)
            one = self._hosted[key] = Hosted(name, handle, asyncio.get_running_loop().create_future())
            try:
                await self._ask(one, START_SECONDS, "create", order)
                one.is_up = True
                await self._ask(one, CALL_SECONDS, "obey", _news(self._members.values()))
            except BackendError as error:
                one.lose(str(error))
                raise
            finally:
                self._begin(self._listen(one))

    async def start(self, worker: str, incarnation: int) -> None:
        """See `Backend.start`."""
        await self._order(worker, incarnation, messages.START)

    async def check_children(self, worker: str, incarnation: int, check: int, children: Sequence[Member]) -> None:
        """See `Backend.check_children`."""
        maps = [asdict(child) for child in children]
        await self._order(worker, incarnation, messages.CHECK_CHILDREN, check=check, children=maps)

    async def failover(self, worker: str, incarnation: int, notice: int, failed: Sequence[Member]) -> None:
        """See `Backend.failover`."""
        maps = [asdict(member) for member in failed]
        await self._order(worker, incarnation, messages.FAILOVER, notice=notice, failed=maps)

    async def publish(self, members: Sequence[Member]) -> None:
        """Does as `Backend.publish`; a lost actor has nobody to tell."""
        self._raise_if_stale()
        self._members |= {member.worker: member for member in members}
        asked = [one for one in self._hosted.values() if one.is_up]  # others are told all once they are
        answers = await asyncio.gather(
            *(self._ask(one, CALL_SECONDS, "obey", _news(members)) for one in asked), return_exceptions=True
        )
        for one, answer in zip(asked, answers, strict=True):
            if isinstance(answer, BaseException) and not (isinstance(answer, BackendError) and one.lost.done()):
                raise answer

    async def stop(self, worker: str, incarnation: int) -> None:
        """See `Backend.stop`."""
        await self._end_worker(messages.STOP, worker, incarnation)

    async def kill(self, worker: str, incarnation: int) -> None:
        """See `Backend.kill`."""
        await self._end_worker(messages.KILL, worker, incarnation)

    async def _end_worker(self, kind: str, worker: str, incarnation: int) -> None:
        async with self._lock_of(worker):
            self._raise_if_stale()
            if (worker, incarnation) in self._hosted:
                await self._order(worker, incarnation, kind)
            else:
                self._highest[worker] = max(self._highest.get(worker, 0), incarnation)
                self._tell_no_process((worker, incarnation))

    async def _order(self, worker: str, incarnation: int, kind: str, **fields: Any) -> None:
        self._raise_if_stale()
        one = self._hosted.get((worker, incarnation))
        if one is not None and not one.lost.done():  # else its end was told, or will be
            await self._ask(one, CALL_SECONDS, "obey", {"kind": kind, **fields})

    async def _end(self, one: Hosted) -> None:
        """Kills a worker, and returns once nothing of it is left; its end is among the events then."""
        with contextlib.suppress(BackendError, TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._ask(one, END_SECONDS, "obey", {"kind": messages.KILL})
                await one.gone.wait()
        one.lose("it did not end")
        await one.gone.wait()

    def _tell_no_process(self, key: Key) -> None:
        self._put(WorkerExited(*key, NO_PROCESS, "it has no process", self._clock()))

    def _lock_of(self, worker: str) -> asyncio.Lock:
        return self._locks.setdefault(worker, asyncio.Lock())

    def _raise_if_stale(self) -> None:
        if self._stale is not None:
            raise self._stale

    # --- events ---

    async def events(self) -> AsyncIterator[Event | Heartbeat]:
        """See `Backend.events`. Raises `StaleMasterError` once an actor has obeyed another master."""
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
        """See `Backend.acknowledge`. The actor of a worker whose end is acknowledged goes."""
        if isinstance(event, Heartbeat) or (source := self._sources.pop(event, None)) is None:
            return
        one, number = source
        one.acknowledge(number)
        if isinstance(event, WorkerExited | CreateFailed):
            self._begin(self._call(f"removing actor {one.name}", self._ray.remove_actor, str(one.name)))

    def _put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    def _take(self, one: Hosted, said: Mapping[str, Any]) -> None:
        """Takes what an actor said."""
        for report in said["reports"]:
            if (number := report["number"]) <= one.received:
                continue
            event = event_of(report, self._clock())
            one.received, one.unacknowledged[number] = number, False
            self._sources[event] = (one, number)
            one.created = one.created or isinstance(event, Created)
            self._put(event)
            if isinstance(event, WorkerExited | CreateFailed):
                self._hosted.pop((one.name.worker, one.name.incarnation), None)
                one.gone.set()
        if said["beat"] is not None:
            beat = Heartbeat(**{name: value for name, value in said["beat"].items() if name != "kind"})
            waiting = self._beats.get(beat.worker)
            was_alive = waiting is not None and waiting.alive and waiting.incarnation == beat.incarnation
            self._beats[beat.worker] = replace(beat, alive=beat.alive or was_alive)
            self._arrived.set()

    async def _listen(self, one: Hosted) -> None:
        """Takes what an actor says, until its worker's end; tells that end if the actor is lost before."""
        pulse = self.job.lease_seconds / 4
        try:
            while not one.gone.is_set():
                said = await self._ask(one, pulse + self._silence, "said", one.received, one.acknowledged, pulse)
                one.node = said["node"]
                self._take(one, said)
        except BackendError as error:
            one.lose(str(error))
            node_gone = await self._fence(one)
            self._raise_if_stale()
            self._tell_lost(one, node_gone)

    def _tell_lost(self, one: Hosted, node_gone: bool) -> None:
        worker, incarnation = key = one.name.worker, one.name.incarnation
        reason, at = one.lost.result(), self._clock()
        if not one.created:
            self._put(CreateFailed(worker, incarnation, reason, at))
        elif node_gone:
            self._put(NodeLost(one.node, reason, at))
        else:
            self._put(WorkerExited(worker, incarnation, NO_PROCESS, reason, at))
        del self._hosted[key]
        one.gone.set()

    # --- what is lost ---

    async def _fence(self, one: Hosted) -> bool:
        """Returns once nothing of a lost worker runs any more; True if its whole node is gone, so that all there is lost.

        A node that cannot show it is waited for until what may run there has killed itself, and left for a while.
        """
        over = time.monotonic() + LEASES_OF_THE_FENCE * self.job.lease_seconds
        try:
            async with asyncio.timeout(LEASES_OF_THE_FENCE * self.job.lease_seconds):
                await self._call(f"removing actor {one.name}", self._ray.remove_actor, str(one.name))
                if await self._cleared(one.node, str(one.name)):
                    return False
        except (TimeoutError, BackendError) as error:
            logger.warning("waiting until the fence of worker %s is over: %s", one.name.worker, error or "no answer")
        self._unreachable[one.node] = time.monotonic() + UNREACHABLE_SECONDS
        await asyncio.sleep(max(0.0, over - time.monotonic()))
        return not any(node.alive and node.name == one.node for node in await self.nodes())

    async def _cleared(self, node: str, condemned: str) -> bool:
        """Whether a node has shown that nothing of the actor `condemned`, and of others that are dead, is left there."""
        what = f"clearing node {node}"
        left = await self._call(what, self._ray.clear, node, self._key, condemned, CALL_SECONDS)
        if left:
            logger.error("processes of worker %s on node %s cannot be killed: %s", condemned, node, left)
        return not left

    async def _clear_nodes(self) -> None:
        """Clears every node that answers of what dead actors left."""
        living = [node.name for node in await self.nodes() if node.alive]
        for found in await asyncio.gather(*(self._cleared(node, "") for node in living), return_exceptions=True):
            if isinstance(found, BackendError):
                logger.warning("a node was not cleared: %s", found)

    async def _look_at_nodes(self) -> None:
        """Loses the actors on nodes that Ray knows to be dead."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                dead = {node.name for node in await self.nodes() if not node.alive}
            except BackendError as error:
                logger.warning("Ray does not say which nodes live: %s", error)
                continue
            for one in self._hosted.values():
                if one.node in dead:
                    one.lose(f"node {one.node} is dead")

    # --- masters come and go ---

    def handles(self) -> Mapping[str, Any]:
        """See `Backend.handles`: in which bundle each worker is placed. All names on Ray follow from that."""
        placed = {f"{_PLACED}{worker}": bundle.name for bundle in self._bundles.values() for worker in bundle.needs}
        return {"ray_address": self._ray.address, **placed}

    async def adopt(self, handles: Mapping[str, Any]) -> Sequence[LivingWorker]:
        """See `Backend.adopt`: asks Ray for the job's actors."""
        self._ray.address = self._ray.address or str(handles.get("ray_address", ""))
        placed: dict[str, list[str]] = {}
        for handle, bundle in handles.items():
            if handle.startswith(_PLACED):
                placed.setdefault(str(bundle), []).append(handle.removeprefix(_PLACED))
        self._bundles |= {
            bundle: Bundle(bundle, {worker: self._needs_of(worker) for worker in workers})
            for bundle, workers in placed.items()
        }
        names = map(ActorName.parse, await self._call("listing the job's actors", self._ray.actors, self._key))
        found = await asyncio.gather(*(self._adopt_one(name) for name in names if name is not None))
        living = [one for one in found if one is not None]
        if {worker for workers in placed.values() for worker in workers} - {one.worker for one in living}:
            await self._clear_nodes()  # of an actor that died while nobody listened
        return living

    async def _adopt_one(self, name: ActorName) -> LivingWorker | None:
        """Takes one actor over, with what it kept; removes one that does not answer, or has nothing to say."""
        self._highest[name.worker] = max(self._highest.get(name.worker, 0), name.incarnation)
        key, living = (name.worker, name.incarnation), None
        try:
            handle = await self._call(f"finding actor {name}", self._ray.actor, str(name))
            one = Hosted(name, handle, asyncio.get_running_loop().create_future())
            said = await self._ask(one, ADOPT_SECONDS, "said", 0, 0, 0.0)
        except BackendError as error:
            logger.warning("cannot adopt actor %s: %s", name, error)
        else:
            living, one.node = said["living"], said["node"]
            one.created, one.is_up = living is not None, True
            self._take(one, said)
            if living is not None and not one.gone.is_set():
                self._hosted[key] = one
                self._begin(self._listen(one))
                return living  # type: ignore[no-any-return]  # it is the actor's
            if one.received:
                return None
        await self._call(f"removing actor {name}", self._ray.remove_actor, str(name))
        return None

    async def close(self, *, end: bool) -> None:
        """See `Backend.close`."""
        try:
            if end:
                self._raise_if_stale()
                await asyncio.gather(*(self._end(one) for one in list(self._hosted.values())))
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._connected:
                try:
                    if end and self._stale is None:
                        await self._remove_all()
                finally:
                    self._connected = False
                    await in_thread("disconnecting from Ray", CALL_SECONDS, self._ray.disconnect)

    async def _remove_all(self) -> None:
        """Removes whatever of the job is left on Ray, by its names."""
        for name in await self._call("listing the job's actors", self._ray.actors, self._key):
            if ActorName.parse(name) is not None:  # not the master's own
                await self._call(f"removing actor {name}", self._ray.remove_actor, name)
        for group in await self._call("listing the job's placement groups", self._ray.groups, self._key):
            await self._call(f"removing placement group {group}", self._ray.remove_group, group)

    # --- calls ---

    async def _ask(self, one: Hosted, seconds: float, method: str, *arguments: Any) -> Mapping[str, Any]:
        """Returns an actor's answer. What cannot be delivered is sent again; all that an actor is asked may be repeated.

        Raises `BackendError` if the actor is lost, refuses, or does not answer in time, by a clock that counts only while this
        process runs; `StaleMasterError` if it has another master.
        """
        import ray

        clock = RunningClock()
        while clock.read() < seconds:
            answer = _answer_of(getattr(one.handle, method).remote(self.epoch, *arguments))
            while not answer.done() and clock.read() < seconds:
                await asyncio.wait({answer, one.lost}, timeout=PULSE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if one.lost.done():
                    raise BackendError(f"the actor of {one.name.worker} is lost: {one.lost.result()}")
            if not answer.done():
                break
            error = answer.exception()
            if isinstance(error, ray.exceptions.ActorUnavailableError):  # perhaps it is dead; that is told, too
                await asyncio.sleep(PULSE_SECONDS)
                continue
            if isinstance(error, ray.exceptions.RayActorError):
                raise BackendError("its actor died")
            if error is not None:
                raise BackendError(f"the actor of {one.name.worker} failed: {_first_line(error)}")
            said: Mapping[str, Any] = answer.result()
            if "refused" in said:
                raise BackendError(f"the actor of {one.name.worker} refused: {said['refused']}")
            if "stale" in said:
                self._stale = self._stale or StaleMasterError(
                    f"the actor of {one.name.worker} obeys a master of epoch {said['stale']}; this one has epoch {self.epoch}"
                )
                self._arrived.set()
                raise self._stale
            return said
        raise BackendError(f"its actor did not answer {method} within {seconds:g} s")

    async def _call(
        self, what: str, function: Callable[..., Any], *arguments: Any, seconds: float = CALL_SECONDS
    ) -> Any:
        """Calls Ray in a thread, once connected."""
        async with self._connecting:
            if not self._connected:
                await in_thread(f"connecting to Ray at {self._ray.address}", CONNECT_SECONDS, self._ray.connect)
                self._connected = True
                self._begin(self._look_at_nodes())
        return await in_thread(what, seconds, function, *arguments)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something beside the master's calls; what it raises is logged."""

        async def guarded() -> None:
            try:
                await work
            except StaleMasterError:
                pass  # the events end with it
            except Exception:
                logger.exception("a task of the backend failed")

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _needs_of(self, worker: str) -> Resources:
        """What a worker takes of its bundle."""
        role = role_of(worker)
        return Resources() if worker == f"{role}-{MASTER}" else self.job.role(role).resources


def _news(members: Iterable[Member]) -> dict[str, Any]:
    return {"kind": messages.MEMBERS, "members": [asdict(member) for member in members]}


def _answer_of(reference: Any) -> asyncio.Future[Any]:
    """What becomes the result of a call of Ray, on this event loop. It may be given up, which Ray's own future must not be."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def settle(ended: Future[Any]) -> None:
        if not answer.done():
            error = ended.exception()
            answer.set_result(ended.result()) if error is None else answer.set_exception(error)
            answer.exception()  # perhaps nobody waits for it any more

    def tell(ended: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            answer.get_loop().call_soon_threadsafe(settle, ended)

    reference.future().add_done_callback(tell)
    return answer


def _first_line(error: BaseException) -> str:
    """The first line of what the actor raised, or of Ray's own message."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
