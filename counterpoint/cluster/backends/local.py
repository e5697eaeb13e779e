"""The backend for one machine: a keeper for each worker (`transport/process/keeper`); nothing else needs to be installed.

A job has one node unless a test, or somebody who wants to see how a job behaves on several, asks for more: they share the
machine's resources equally, and are names for places. The keepers outlive a master by a lease; the next one finds them by their
sockets in `workers/` in the job's directory. The file `epoch` there says which master was the last to look: a keeper that an
earlier one starts after that ends at once, so two masters never both have a process of a worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from counterpoint.cluster.backends.base import Backend, Bundle, Heartbeat, Node
from counterpoint.cluster.backends.capacity import choose, require_capacity, total_of
from counterpoint.cluster.backends.keeper_link import CONNECT_SECONDS, NO_PROCESS, SUFFIX, WORKERS, KeeperLink
from counterpoint.cluster.backends.order import LivingWorker, WorkerOrder
from counterpoint.cluster.devices import DEVICES, visible_devices
from counterpoint.cluster.errors import BackendError, StaleMasterError
from counterpoint.cluster.log_rotation import rotate_if_full
from counterpoint.cluster.manager.events import CreateFailed, Event, WorkerExited
from counterpoint.cluster.member import Member
from counterpoint.cluster.remains import has_agents_of_old
from counterpoint.cluster.spec import JobSpec
from counterpoint.transport.config import machine_memory
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.own_directory import remove_left
from counterpoint.transport.process.keeper import messages
from counterpoint.transport.process.keeper.main import EPOCH_FILE, epoch_in
from counterpoint.transport.process.launch import SHARED_TMPDIR, TEMPORARY

logger = logging.getLogger(__name__)

END_SECONDS = 10.0
"""How long `close(end=True)` waits for the keepers to end in order."""

PREDECESSOR_SECONDS = 60.0
"""How long a new worker waits for the end of its earlier incarnation, which is killed."""

PULSE_SECONDS = 0.5
"""Seconds between two looks at the clock."""

ROTATION_SECONDS = 5.0
"""How often logs are looked at."""

LEASES_ELSEWHERE = 2.0
"""Leases within which the keepers of a master that is gone have ended, whatever they wait for."""

OLD_LEASES = 3.0
"""Leases within which what an earlier version of the product left has ended by itself."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a bundle."""

    node: str
    total: Mapping[str, float]
    devices: Mapping[str, str] = field(default_factory=dict)
    """The accelerators of its workers, as `CUDA_VISIBLE_DEVICES`."""


class LocalBackend(Backend):
    """A `Backend`: workers as processes of this machine. Make it on the event loop that uses it; `close` it."""

    def __init__(
        self,
        job: JobSpec,
        directory: Path,
        epoch: int,
        *,
        nodes: int = 1,
        resources: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Splits the machine over `nodes` nodes; `resources` replaces what each has, or adds to it. `clock` dates the events."""
        self.job, self.epoch = job, epoch
        self._folder = directory.resolve() / WORKERS
        devices = visible_devices()
        share = len(devices) // nodes
        self._devices = {f"node-{index}": devices[index * share : (index + 1) * share] for index in range(nodes)}
        cores, memory = len(os.sched_getaffinity(0)) / nodes, machine_memory() // nodes
        self._nodes = [
            Node(name, True, {"cpu": cores, "memory_bytes": memory, "gpu": len(its), **(resources or {})})
            for name, its in self._devices.items()
        ]
        self._places: dict[str, _Place] = {}
        self._clock = clock
        self.links: dict[str, KeeperLink] = {}
        """The keeper of each worker that has one, by worker."""
        self._newest: dict[str, int] = {}
        """The highest incarnation of each worker that was created, or that was asked to end before it was."""
        self._events: deque[Event] = deque()
        self._beats: dict[str, Heartbeat] = {}
        """The latest of each worker that was not taken yet."""
        self._arrived = asyncio.Event()
        self._sources: dict[Event, tuple[KeeperLink, int]] = {}
        """The keeper from which each event came that is not acknowledged."""
        self._stale: StaleMasterError | None = None
        self._members: dict[str, Member] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        """Held while a worker is created or ended: what ends it must not overtake what creates it."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def nodes(self) -> Sequence[Node]:
        """See `Backend.nodes`."""
        return self._nodes

    # --- places ---

    async def check_capacity(self, bundles: Sequence[Bundle]) -> None:
        """See `Backend.check_capacity`."""
        require_capacity(bundles, self._nodes)

    async def allocate(self, bundle: Bundle, avoid: Sequence[str]) -> None:
        """See `Backend.allocate`."""
        self._raise_if_stale()
        if bundle.name not in self._places:
            taken: dict[str, list[Mapping[str, float]]] = {}
            for place in self._places.values():
                taken.setdefault(place.node, []).append(place.total)
            node = choose(bundle, self._nodes, taken, avoid)
            total = total_of(bundle.needs.values())
            self._places[bundle.name] = _Place(node, total, self._choose_devices(bundle, node))

    def _choose_devices(self, bundle: Bundle, node: str) -> dict[str, str]:
        """Gives whole accelerators to the workers that need some; one that needs a part of one sees all."""
        used = {
            device
            for place in self._places.values()
            if place.node == node
            for devices in place.devices.values()
            for device in devices.split(",")
        }
        free = [device for device in self._devices[node] if device not in used]
        chosen: dict[str, str] = {}
        for worker, needs in bundle.needs.items():
            count = int(needs.gpu)
            if count and count == needs.gpu and count <= len(free):
                chosen[worker], free = ",".join(free[:count]), free[count:]
        return chosen

    async def release(self, bundle: str) -> None:
        """See `Backend.release`."""
        self._raise_if_stale()
        for link in [link for link in self.links.values() if link.bundle == bundle]:
            await self.kill(link.worker, link.incarnation)
        self._places.pop(bundle, None)

    # --- orders ---

    async def create(self, order: WorkerOrder) -> None:
        """See `Backend.create`."""
        async with self._locks.setdefault(order.worker, asyncio.Lock()):
            self._raise_if_stale()
            newest = self._newest.get(order.worker, 0)
            if order.incarnation < newest:
                raise BackendError(f"incarnation {order.incarnation} of {order.worker} is over; {newest} was here")
            if order.incarnation == newest:  # again
                if self._link(order.worker, newest) is None:
                    self._put_no_process(order.worker, newest)
                return
            place = self._places.get(order.bundle)
            if place is None:
                raise BackendError(f"{order.worker} cannot be created: bundle {order.bundle} has no place")
            await self._end_predecessor(order.worker)
            self._newest[order.worker] = order.incarnation
            devices = place.devices.get(order.worker)
            if devices is not None and DEVICES not in order.environment:
                order = replace(order, environment={**order.environment, DEVICES: devices})
            path = self._folder / f"{order.worker}.{order.incarnation}.{self.epoch}{SUFFIX}"
            link = KeeperLink(path, place.node, order.bundle, self._take)
            try:
                link.start(order, self.epoch, self.job.lease_seconds)
            except (OSError, BackendError) as error:
                reason = f"{order.worker}: {error}"
                self._put(CreateFailed(order.worker, order.incarnation, reason, self._clock()))
                return
            if link.is_class and self._members:
                link.send(messages.SEND, message=_news(self._members.values()))
            self._attend(link)

    async def _end_predecessor(self, worker: str) -> None:
        """Kills an earlier incarnation that lives; returns once nothing of it runs."""
        if (earlier := self.links.get(worker)) is None:
            return
        earlier.send(messages.END)
        try:
            async with asyncio.timeout(PREDECESSOR_SECONDS):
                await earlier.gone.wait()
        except TimeoutError:
            raise BackendError(
                f"{worker} cannot be created: its earlier process is not gone within {PREDECESSOR_SECONDS:g} s"
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
        async with self._locks.setdefault(worker, asyncio.Lock()):
            self._raise_if_stale()
            if (link := self._link(worker, incarnation)) is not None:
                link.send(kind)
            else:
                self._put_no_process(worker, incarnation)

    def _put_no_process(self, worker: str, incarnation: int) -> None:
        """Tells that there is no such process, and sees to it that there will be none."""
        self._newest[worker] = max(self._newest.get(worker, 0), incarnation)
        self._put(WorkerExited(worker, incarnation, NO_PROCESS, "it has no process", self._clock()))

    def _link(self, worker: str, incarnation: int) -> KeeperLink | None:
        link = self.links.get(worker)
        return link if link is not None and link.incarnation == incarnation else None

    def _raise_if_stale(self) -> None:
        if self._stale is not None:
            raise self._stale

    # --- events ---

    async def events(self) -> AsyncIterator[Event | Heartbeat]:
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

    async def acknowledge(self, event: Event | Heartbeat) -> None:
        """See `Backend.acknowledge`."""
        source = None if isinstance(event, Heartbeat) else self._sources.pop(event, None)
        if source is not None:
            link, number = source
            link.acknowledge(number)

    def _put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    def _take(self, event: Event | Heartbeat, link: KeeperLink, number: int) -> None:
        """Takes what a keeper has told."""
        if isinstance(event, Heartbeat):
            waiting = self._beats.get(event.worker)
            if waiting is not None and waiting.alive and waiting.incarnation == event.incarnation:
                event = replace(event, alive=True)
            self._beats[event.worker] = event
            self._arrived.set()
        else:
            event = replace(event, at=self._clock())
            self._sources[event] = (link, number)
            self._put(event)

    # --- keepers ---

    def _attend(self, link: KeeperLink) -> None:
        """Reads what a keeper tells until nothing of it runs any more."""
        self.links[link.worker] = link
        if not self._tasks:
            self._begin(self._pulse())
            self._begin(self._rotate())
        self._begin(self._read(link))

    async def _read(self, link: KeeperLink) -> None:
        await link.run()
        if link.stale_epoch > self.epoch:
            at = f"the keeper of {link.worker} obeys a master of epoch {link.stale_epoch}"
            self._lose(StaleMasterError(f"{at}; this one has epoch {self.epoch}"))
        if self.links.get(link.worker) is link:
            del self.links[link.worker]
        if link.ended or link.stale_epoch or link.is_left:
            return
        key, words = (
            (link.worker, link.incarnation),
            "its keeper did not answer" if link.silent else "its keeper was killed",
        )
        if link.created:
            self._put(WorkerExited(*key, NO_PROCESS, words, self._clock(), lost=link.silent))
        else:
            self._put(CreateFailed(*key, words, self._clock()))

    def _lose(self, error: StaleMasterError) -> None:
        self._stale = error
        self._arrived.set()

    async def _pulse(self) -> None:
        while True:
            for link in list(self.links.values()):
                link.live(self.job.lease_seconds)
            await asyncio.sleep(min(PULSE_SECONDS, self.job.lease_seconds / 8))

    async def _rotate(self) -> None:
        logged: set[str] = set()
        while True:
            await asyncio.sleep(ROTATION_SECONDS)
            for log_file in [link.log_file for link in self.links.values() if link.log_file is not None]:
                try:
                    await asyncio.to_thread(rotate_if_full, log_file)
                except OSError as error:
                    if (text := f"a log cannot be rotated: {error}") not in logged:
                        logged.add(text)
                        logger.warning(text)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something beside the master's calls; what it raises is logged."""

        async def guarded() -> None:
            try:
                await work
            except Exception:
                logger.exception("a task of the backend failed")

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- masters ---

    def handles(self) -> Mapping[str, Any]:
        """See `Backend.handles`: where each bundle is. The keepers are found by their sockets."""
        return {
            f"bundle {name}": {"node": place.node, "total": dict(place.total), "devices": dict(place.devices)}
            for name, place in self._places.items()
        }

    async def adopt(self, handles: Mapping[str, Any]) -> Sequence[LivingWorker]:
        """See `Backend.adopt`."""
        for name, handle in handles.items():
            if name.startswith("bundle ") and handle["node"] in self._devices:
                self._places[name.removeprefix("bundle ")] = _Place(**handle)
        sockets = sorted(self._folder.glob(f"*{SUFFIX}"))
        if self._claim() and sockets:
            seconds = LEASES_ELSEWHERE * self.job.lease_seconds
            logger.warning("waiting %g s, within which all ends that a master on another machine left", seconds)
            await asyncio.sleep(seconds)
        # Keepers that were killed leave them.
        temporary = Path(os.environ.get(SHARED_TMPDIR) or tempfile.gettempdir())
        await asyncio.to_thread(remove_left, temporary, TEMPORARY)
        await self._wait_for_old()
        found = [KeeperLink(path, "", "", self._take) for path in sorted(self._folder.glob(f"*{SUFFIX}"))]
        for link in found:
            try:
                link.find(self.epoch, self.job.lease_seconds)
            except OSError:  # it was killed
                await link.bury()
                continue
            self._newest[link.worker] = max(link.incarnation, self._newest.get(link.worker, 0))
            self._attend(link)
        await asyncio.gather(*(self._adopt(link) for link in self.links.values()))
        self._raise_if_stale()
        return [living for link in self.links.values() if (living := link.living()) is not None]

    def _claim(self) -> bool:
        """Says that this master looks for keepers now: none starts unseen in an earlier one's name. Raises `StaleMasterError`.

        Returns whether the master before it was on another machine, whose keepers nobody reaches from here.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (last := epoch_in(str(self._folder))) > self.epoch:
            raise StaleMasterError(
                f"{self._folder}: a master of epoch {last} was here; this one has epoch {self.epoch}"
            )
        file, here, there = self._folder / EPOCH_FILE, socket.gethostname(), ""
        with suppress(OSError):
            there = file.read_text().partition(" ")[2]
        with suppress(OSError):  # a full disk
            write_atomically(file, f"{self.epoch} {here}".encode(), durable=False)
        return there not in ("", here)

    async def _wait_for_old(self) -> None:
        """Waits for the end of the agents of an earlier version, below which workers of this job may run."""
        try:
            async with asyncio.timeout(OLD_LEASES * self.job.lease_seconds):
                while has_agents_of_old(self._folder.parent):  # noqa: ASYNC110 - other processes
                    await asyncio.sleep(PULSE_SECONDS)
        except TimeoutError:
            raise BackendError(f"{self._folder.parent}: what an earlier version left there does not end") from None

    async def _adopt(self, link: KeeperLink) -> None:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await link.known.wait()
        except TimeoutError:
            link.give_up()
            await link.gone.wait()

    async def close(self, *, end: bool) -> None:
        """See `Backend.close`."""
        links = list(self.links.values())
        if end:
            self._raise_if_stale()
            for link in links:
                link.send(messages.END)
            with suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await asyncio.gather(*(link.gone.wait() for link in links))
            for link in links:
                link.give_up()
            await asyncio.gather(*(link.gone.wait() for link in links))
        for link in links:
            link.disconnect()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _news(members: Any) -> dict[str, Any]:
    return {"kind": messages.MEMBERS, "members": [asdict(member) for member in members]}
