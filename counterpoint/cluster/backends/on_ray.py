"""The backend for a Ray cluster: a placement group for each bundle, and in it a detached actor with an agent for each worker.

Ray places, starts processes on other machines, and tells of dead nodes and actors; the agents do the rest, as on one machine
(`counterpoint/cluster/backends/agent_fleet.py`). Nothing of a job is Ray's to restart. The master's own connection may go: actors
and placement groups are detached, and the next master finds them by their names (`counterpoint/cluster/backends/ray_places.py`).
An agent without a master ends, and the last one of a bundle removes the placement group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import zmq

from counterpoint.cluster.agent.agent import LEASES_OF_THE_FENCE
from counterpoint.cluster.agent.order import LivingWorker, WorkerOrder
from counterpoint.cluster.agent.settings import AgentEndpoint
from counterpoint.cluster.backends.agent_fleet import AgentFleet, Seat
from counterpoint.cluster.backends.agent_link import AgentLink
from counterpoint.cluster.backends.base import Bundle, Node
from counterpoint.cluster.backends.capacity import require_capacity, require_place
from counterpoint.cluster.backends.ray_cluster import RayCluster
from counterpoint.cluster.backends.ray_places import ActorName, group_name, job_key
from counterpoint.cluster.backends.ray_threads import in_thread
from counterpoint.cluster.errors import BackendError
from counterpoint.cluster.spec import MASTER, JobSpec, Resources, role_of
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.wires.endpoint import CurveKeys, load_pair
from counterpoint.transport.wires.key_files import certificate

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0
CALL_SECONDS = 30.0
PLACE_SECONDS = 10.0
"""How long a bundle waits for a place before the manager is told that there is none now."""

START_SECONDS = 90.0
"""Longest time from the creation of an actor to its agent's endpoint."""

UNREACHABLE_SECONDS = 30.0
"""Nothing is placed for so long on a node that could not show that nothing of an agent is left there. Ray itself takes about as
long to give a node up."""

POLL_SECONDS = 1.0
"""Seconds between two looks at Ray's nodes."""

_PLACED = "bundle of "
"""How a handle that names a worker's bundle begins; the worker follows."""

DIED = -1
"""Stands for the exit code of an agent whose actor died."""

REPORT_SECONDS = 5.0
"""How long the reports of killed workers may take before their agents are ended, too."""


def master_keys(directory: Path) -> CurveKeys:
    """Returns the CURVE keys by which agents on other machines know the masters of the job in `directory`: one pair for all.

    They are made the first time, in a file that the job's user alone may read; an agent is given the public key only. Raises
    `OSError`, or `ValueError` for a bad file.
    """
    agents = directory / "agents"
    file = agents / "master.key_secret"
    if not file.exists():
        agents.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):  # another master has just written some
            write_atomically(file, certificate(*zmq.curve_keypair()), mode=0o600, new=True)
    try:
        public, secret = load_pair(file)
    except ValueError as error:
        raise ValueError(f"{error}; remove it while no agent of the job lives, and new keys are made") from None
    return CurveKeys(public, public, secret)


class RayBackend(AgentFleet):
    """The backend. Its seats are called as their workers."""

    def __init__(
        self,
        job: JobSpec,
        directory: Path,
        epoch: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        keys: CurveKeys | None = None,
        address: str = "",
    ) -> None:
        """Takes what every backend takes, and Ray's address; without it, `$RAY_ADDRESS` has it.

        Without `keys`, those in the job's directory are used, which the job's first master makes.
        """
        self._keys = keys or master_keys(directory)
        super().__init__(job, directory, epoch, clock=clock, keys=self._keys)
        self._ray = RayCluster(address)
        self._key = job_key(job.name, directory)
        self._actors: dict[str, ActorName] = {}
        """The actor of each worker."""
        self._ends: dict[str, asyncio.Future[int]] = {}
        """The end of each worker: what becomes the exit code of its agent, or `DIED` when its actor has died."""
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
        await self.kill_bundle(bundle)
        inside = [self.seats[worker] for worker, actor in self._actors.items() if actor.bundle == bundle]
        deadline = time.monotonic() + REPORT_SECONDS
        for seat in inside:
            while seat.workers and time.monotonic() < deadline:  # noqa: ASYNC110 - its link sets no event
                await asyncio.sleep(0.01)
        await asyncio.gather(*(self._end_seat(seat) for seat in inside))
        self._bundles.pop(bundle, None)
        await self._call(f"releasing bundle {bundle}", self._ray.remove_group, group_name(self._key, bundle))

    async def nodes(self) -> Sequence[Node]:
        """See `Backend.nodes`."""
        nodes: list[Node] = await self._call("listing the nodes", self._ray.nodes)
        return nodes

    # --- agents ---

    async def seat_for(self, order: WorkerOrder) -> Seat:
        """Returns the worker's own seat, whose agent it shares with its former selves while that lives."""
        seat = self.seats.setdefault(order.worker, Seat(order.worker, ""))
        deadline = time.monotonic() + START_SECONDS
        while True:
            async with seat.lock:
                if seat.link is None:
                    await self._seat(seat, order)
                    return seat
                if seat.link.usable:
                    return seat
                if not seat.link.lost:
                    seat.link.lose(f"it ends: {seat.link.ending}")
            if time.monotonic() > deadline:
                raise BackendError(f"the former agent of {order.worker} is not gone after {START_SECONDS:g} s")
            await asyncio.sleep(0.02)  # `_bury` takes the lock

    async def _seat(self, seat: Seat, order: WorkerOrder) -> None:
        """Starts an actor with an agent, and links to it."""
        name = ActorName(self._key, order.bundle, order.worker, order.incarnation)
        settings = {
            "agent": secrets.token_hex(8),
            "job": self.job.name,
            "name": order.worker,
            "directory": str(self._agents),
            "lease_seconds": self.job.lease_seconds,
            "master_key": self._keys.public.decode(),
        }
        if order.bundle in self._bundles:  # agents that had no master for a while may have removed it
            await self._reserve(self._bundles[order.bundle], ())
        group, needs = group_name(self._key, order.bundle), self._needs_of(order.worker)
        await self._call(f"creating actor {name}", self._ray.start_actor, str(name), group, needs, settings)
        try:
            endpoint = await self._endpoint(name)
            self._actors[order.worker] = name
            seat.node = endpoint.node
            await self.link_to(seat, endpoint)
        except BackendError:
            await self._call(f"removing actor {name}", self._ray.remove_actor, str(name))
            raise

    async def _endpoint(self, name: ActorName) -> AgentEndpoint:
        said = await self._call(
            f"waiting for the agent of {name}",
            self._ray.endpoint,
            str(name),
            START_SECONDS,
            seconds=START_SECONDS + CALL_SECONDS,
        )
        return AgentEndpoint.model_validate(said)

    def watch(self, seat: Seat, link: AgentLink) -> None:
        """Has Ray tell of the actor's end, which it knows before the agent's silence shows it."""
        end = self._ends[seat.name] = asyncio.get_running_loop().create_future()
        self.begin(self._watch(link, self._actors[seat.name], end))

    async def _watch(self, link: AgentLink, name: ActorName, end: asyncio.Future[int]) -> None:
        loop = end.get_loop()

        def tell(ended: Future[int]) -> None:
            code = DIED if ended.exception() is not None else ended.result()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, end, code)

        (await self._call(f"watching actor {name}", self._ray.end_of, str(name))).add_done_callback(tell)
        code = await asyncio.shield(end)
        link.lose("its actor died" if code == DIED else f"it ended with code {code}")

    async def fence(self, seat: Seat, endpoint: AgentEndpoint, patience: float = 0.0) -> bool:
        """See `AgentFleet.fence`: removes the actor, and has its node show that nothing is left.

        A node that cannot is waited for until what may run there has killed itself for want of a master, and left for a while.
        """
        name, end = self._actors.pop(seat.name, None), self._ends.pop(seat.name, None)
        if end is not None and await _ended_in_order(end, patience):
            return False
        over = time.monotonic() + LEASES_OF_THE_FENCE * self.job.lease_seconds
        try:
            async with asyncio.timeout(LEASES_OF_THE_FENCE * self.job.lease_seconds):
                if await self._cleared(seat, endpoint, name):
                    return False
        except TimeoutError:
            logger.warning("node %s did not answer while worker %s was fenced", endpoint.node, seat.name)
        self._unreachable[endpoint.node] = time.monotonic() + UNREACHABLE_SECONDS
        await asyncio.sleep(max(0.0, over - time.monotonic()))
        return not any(node.alive and node.name == endpoint.node for node in await self.nodes())

    async def _cleared(self, seat: Seat, endpoint: AgentEndpoint, name: ActorName | None) -> bool:
        """Whether a node has shown that nothing of an agent is left there."""
        try:
            if name is not None:
                await self._call(f"removing actor {name}", self._ray.remove_actor, str(name))
            left = await self._call(
                f"clearing node {endpoint.node}", self._ray.clear, endpoint.node, self._agents, seat.name, CALL_SECONDS
            )
        except BackendError as error:
            logger.warning("waiting until the fence of worker %s is over: %s", seat.name, error)
            return False
        if left:
            logger.error("processes of worker %s on node %s cannot be killed: %s", seat.name, endpoint.node, left)
        return not left

    async def _look_at_nodes(self) -> None:
        """Loses the agents of nodes that Ray knows to be dead."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                dead = {node.name for node in await self.nodes() if not node.alive}
            except BackendError as error:
                logger.warning("Ray does not say which nodes live: %s", error)
                continue
            for seat in self.seats.values():
                if seat.node in dead and seat.link is not None:
                    seat.link.lose(f"node {seat.node} is dead")

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
        newest: dict[str, ActorName] = {}
        for text in await self._call("listing the job's actors", self._ray.actors, self._key):
            name = ActorName.parse(text)
            if name is not None and name.incarnation > (
                newest[name.worker].incarnation if name.worker in newest else 0
            ):
                newest[name.worker] = name
        found = await asyncio.gather(*(self._endpoint(name) for name in newest.values()), return_exceptions=True)
        seats = []
        for name, endpoint in zip(newest.values(), found, strict=True):
            if isinstance(endpoint, AgentEndpoint):
                self._actors[name.worker] = name
                seats.append((Seat(name.worker, endpoint.node), endpoint))
            elif isinstance(endpoint, BackendError):
                logger.warning("cannot adopt actor %s: %s", name, endpoint)
                await self._call(f"removing actor {name}", self._ray.remove_actor, str(name))
            else:
                raise endpoint
        return await self.adopt_seats(seats)

    async def close(self, *, end: bool) -> None:
        """See `Backend.close`."""
        if not self._connected:
            await super().close(end=end)
            return
        try:
            await super().close(end=end)
            if end:
                await self._remove_all()
        finally:
            self._connected = False
            await in_thread("disconnecting from Ray", CALL_SECONDS, self._ray.disconnect)

    async def _remove_all(self) -> None:
        """Removes whatever of the job is left on Ray, by its names."""
        for name in await self._call("listing the job's actors", self._ray.actors, self._key):
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
                self.begin(self._look_at_nodes())
        return await in_thread(what, seconds, function, *arguments)

    @property
    def _agents(self) -> Path:
        """The directory of the agents' own files, on each node."""
        return (self.directory / "agents").resolve()

    def _needs_of(self, worker: str) -> Resources:
        """What a worker takes of its bundle."""
        role = role_of(worker)
        return Resources() if worker == f"{role}-{MASTER}" else self.job.role(role).resources


def _settle(end: asyncio.Future[int], code: int) -> None:
    if not end.done():
        end.set_result(code)


async def _ended_in_order(end: asyncio.Future[int], patience: float) -> bool:
    """Whether an agent ends by itself within so many seconds, and so ends all that is below it."""
    await asyncio.wait((end,), timeout=patience)
    return end.done() and end.result() == 0
