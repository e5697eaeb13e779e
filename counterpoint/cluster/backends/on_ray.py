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
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from counterpoint.cluster.backends.actor_link import ADOPT_SECONDS, ActorLink
from counterpoint.cluster.backends.base import Bundle, Node
from counterpoint.cluster.backends.capacity import require_capacity, require_place
from counterpoint.cluster.backends.kept import KeptBackend
from counterpoint.cluster.backends.link import LEASES_OF_THE_FENCE
from counterpoint.cluster.backends.order import LivingWorker, WorkerOrder
from counterpoint.cluster.backends.ray_cluster import RayCluster, in_thread
from counterpoint.cluster.backends.ray_places import ActorName, group_name, job_key
from counterpoint.cluster.errors import BackendError
from counterpoint.cluster.spec import MASTER, JobSpec, Resources, role_of

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0
CALL_SECONDS = 30.0
PLACE_SECONDS = 10.0
"""How long a bundle waits for a place before the manager is told that there is none now."""

UNREACHABLE_SECONDS = 30.0
"""Nothing is placed for so long on a node that could not show that nothing of a worker is left there. Ray itself takes about as
long to give a node up."""

POLL_SECONDS = 1.0
"""Seconds between two looks at Ray's nodes."""

_PLACED = "bundle of "
"""How a handle that names a worker's bundle begins; the worker follows."""


class RayBackend(KeptBackend[ActorLink]):
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
        super().__init__(job, epoch, clock)
        self._ray = RayCluster(address)
        self._key = job_key(job.name, directory)
        self._bundles: dict[str, Bundle] = {}
        """Those that were placed."""
        self._unreachable: dict[str, float] = {}
        """Nodes that did not answer: until when nothing is placed there, by `time.monotonic`."""
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
        await self._end([link for link in self.links.values() if link.bundle == bundle])
        self._bundles.pop(bundle, None)
        await self._call(f"releasing bundle {bundle}", self._ray.remove_group, group_name(self._key, bundle))

    async def nodes(self) -> Sequence[Node]:
        """See `Backend.nodes`."""
        nodes: list[Node] = await self._call("listing the nodes", self._ray.nodes)
        return nodes

    # --- actors ---

    async def _link_for(self, order: WorkerOrder) -> tuple[ActorLink, WorkerOrder]:
        """See `KeptBackend._link_for`."""
        if order.bundle in self._bundles:  # actors that had no master for a while may have removed it
            await self._reserve(self._bundles[order.bundle], ())
        name = ActorName(self._key, order.bundle, order.worker, order.incarnation)
        group, needs = group_name(self._key, order.bundle), self._needs_of(order.worker)

        async def reach() -> Any:
            lease = self.job.lease_seconds
            return await self._call(f"creating actor {name}", self._ray.start_actor, str(name), group, needs, lease)

        return self._link_to(name, reach), order

    def _link_to(self, name: ActorName, reach: Callable[[], Awaitable[Any]]) -> ActorLink:
        return ActorLink(name, self.epoch, reach, self._bury, self._clock, self._take)

    async def _bury(self, link: ActorLink) -> None:
        """Removes the actor of a worker that has ended; sees to it that nothing runs of one that is lost."""
        try:
            if link.ended and not link.silent:
                await self._call(f"removing actor {link.name}", self._ray.remove_actor, str(link.name))
            else:
                link.node_is_gone = await self._fence(link)
        except BackendError as error:
            logger.warning("Ray does not answer, and the actor of %s may be left: %s", link.worker, error)

    # --- what is lost ---

    async def _fence(self, one: ActorLink) -> bool:
        """Returns once nothing of a lost worker runs any more; True if its whole node is gone, so that all there is lost.

        A node that cannot show it is waited for until what may run there has killed itself, and left for a while; so is a worker
        that never said on which node it is.
        """
        over = time.monotonic() + LEASES_OF_THE_FENCE * self.job.lease_seconds
        try:
            async with asyncio.timeout(LEASES_OF_THE_FENCE * self.job.lease_seconds):
                await self._call(f"removing actor {one.name}", self._ray.remove_actor, str(one.name))
                if not one.node:
                    raise BackendError("its actor never said on which node it is")
                if await self._cleared(one.node, str(one.name)):
                    return False
        except (TimeoutError, BackendError) as error:
            logger.warning("waiting until the fence of worker %s is over: %s", one.worker, error or "no answer")
        if one.node:
            self._unreachable[one.node] = time.monotonic() + UNREACHABLE_SECONDS
        await asyncio.sleep(max(0.0, over - time.monotonic()))
        return bool(one.node) and not any(node.alive and node.name == one.node for node in await self.nodes())

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
            for one in list(self.links.values()):
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
        names_found = sorted((name for name in names if name is not None), key=lambda name: name.incarnation)
        found = [link for link in await asyncio.gather(*map(self._find, names_found)) if link is not None]
        for link in found:
            self._attend(link)
        living = await self._adopt_links(found, ADOPT_SECONDS)
        if {worker for workers in placed.values() for worker in workers} - {one.worker for one in living}:
            await self._clear_nodes()  # of an actor that died while nobody listened
        return living

    async def _find(self, name: ActorName) -> ActorLink | None:
        """Connects to an actor of an earlier master; removes one that does not answer, or has nothing to say."""
        self._newest[name.worker] = max(self._newest.get(name.worker, 0), name.incarnation)
        link = self._link_to(name, lambda: self._call(f"finding actor {name}", self._ray.actor, str(name)))
        try:
            await link.find(self.epoch, self.job.lease_seconds)
        except BackendError as error:
            if not self._obeys_another(link):
                logger.warning("cannot adopt actor %s: %s", name, error)
                await self._call(f"removing actor {name}", self._ray.remove_actor, str(name))
            return None
        return link

    async def close(self, *, end: bool) -> None:
        """See `Backend.close`."""
        try:
            await super().close(end=end)
        finally:
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

    def _needs_of(self, worker: str) -> Resources:
        """What a worker takes of its bundle."""
        role = role_of(worker)
        return Resources() if worker == f"{role}-{MASTER}" else self.job.role(role).resources
