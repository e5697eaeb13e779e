"""The backend for one machine: an agent for each node, and every node on this machine; nothing else needs to be installed.

A job has one node unless a test, or somebody who wants to see how a job behaves on several, asks for more: they share the
machine's resources equally. A lost agent is a lost node; the next worker that is placed there starts a new agent. The agents keep
their endpoints in `agents/` in the job's directory, where a later master finds them even if it has no journal of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from counterpoint.cluster.agent.order import LivingWorker, WorkerOrder
from counterpoint.cluster.agent.remains import kill_marked
from counterpoint.cluster.agent.settings import AgentEndpoint, AgentSettings, lock_file, mark_of, read_endpoint
from counterpoint.cluster.agent.starting import POLL_SECONDS, agent_in, lives, reap, start_steps
from counterpoint.cluster.backends.agent_fleet import AgentFleet, Seat
from counterpoint.cluster.backends.agent_link import AgentLink
from counterpoint.cluster.backends.base import Bundle, Node
from counterpoint.cluster.backends.capacity import choose, require_capacity, total_of
from counterpoint.cluster.errors import BackendError
from counterpoint.cluster.spec import JobSpec
from counterpoint.transport.config import machine_memory
from counterpoint.transport.files.lock import take_lock

logger = logging.getLogger(__name__)

AGENTS = "agents"
"""The folder of the agents' files, in the job's directory."""

DEVICES = "CUDA_VISIBLE_DEVICES"

DEATH_SECONDS = 20.0
"""How long the end of a killed agent is waited for."""

LAST_REPORTS_SECONDS, LAST_REPORTS_IN_ORDER_SECONDS = 0.05, 1.0
"""What an agent sent before it died is still read for so long: before it was killed, or ended in order, when it sent all."""

SEAT_SECONDS = 60.0
"""How long a new worker waits for its node's agent to be gone and started again."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a bundle."""

    node: str
    total: Mapping[str, float]
    devices: Mapping[str, str] = field(default_factory=dict)
    """The accelerators of its workers, as `CUDA_VISIBLE_DEVICES`."""


class LocalBackend(AgentFleet):
    """A `Backend`: agents as processes of this machine."""

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
        """Splits the machine over `nodes` nodes; `resources` replaces what each has, or adds to it."""
        super().__init__(job, directory, epoch, clock=clock)
        self._agents = directory.resolve() / AGENTS
        devices = visible_devices()
        share = len(devices) // nodes
        self._devices = {f"node-{index}": devices[index * share : (index + 1) * share] for index in range(nodes)}
        cores, memory = len(os.sched_getaffinity(0)) / nodes, machine_memory() // nodes
        self._nodes = [
            Node(name, True, {"cpu": cores, "memory_bytes": memory, "gpu": len(its), **(resources or {})})
            for name, its in self._devices.items()
        ]
        self._places: dict[str, _Place] = {}
        self._watched: dict[AgentLink, int] = {}
        """The descriptors that tell of the agents' deaths."""

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
        await self._usable_seat(self._places[bundle.name].node)

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
        await self.kill_bundle(bundle)
        self._places.pop(bundle, None)

    async def create(self, order: WorkerOrder) -> None:
        """See `Backend.create`."""
        place = self._places.get(order.bundle)
        devices = place.devices.get(order.worker) if place is not None else None
        if devices is not None and DEVICES not in order.environment:
            order = replace(order, environment={**order.environment, DEVICES: devices})
        await super().create(order)

    # --- agents ---

    async def seat_for(self, order: WorkerOrder) -> Seat:
        """See `AgentFleet.seat_for`."""
        place = self._places.get(order.bundle)
        if place is None:
            raise BackendError(f"{order.worker} cannot be created: bundle {order.bundle} has no place")
        return await self._usable_seat(place.node)

    async def _usable_seat(self, node: str) -> Seat:
        """Returns the node's seat with an agent: found, started, or started once the one that ends is gone."""
        seat = self.seats.setdefault(node, Seat(node, node))
        deadline = time.monotonic() + SEAT_SECONDS
        while time.monotonic() < deadline:
            async with seat.lock:
                if seat.link is None:
                    await self._link(seat)
                if seat.link is not None and seat.link.usable:
                    return seat
            await asyncio.sleep(POLL_SECONDS)
        raise BackendError(f"the agent of node {node} was not gone and started again within {SEAT_SECONDS:g} s")

    async def _link(self, seat: Seat) -> None:
        """Links an empty seat to an agent; one that lives and does not answer is killed."""
        self._raise_if_stale()
        endpoint = await self._find_or_start(seat.node)
        try:
            await self.link_to(seat, endpoint)
        except BackendError as error:
            logger.warning("the agent of node %s is killed: %s", seat.node, error)
            await self.fence(seat, endpoint)

    async def _find_or_start(self, node: str) -> AgentEndpoint:
        if (endpoint := agent_in(self._agents, node)) is not None:
            return endpoint
        settings = AgentSettings(
            agent=secrets.token_hex(8),
            job=self.job.name,
            node=node,
            name=node,
            directory=self._agents,
            lease_seconds=self.job.lease_seconds,
        )
        for found in start_steps(settings):
            if found is not None:
                return found
            await asyncio.sleep(POLL_SECONDS)
        raise AssertionError("unreachable")

    def watch(self, seat: Seat, link: AgentLink) -> None:
        """See `AgentFleet.watch`: the kernel tells of the agent's death, whoever started it."""
        try:
            descriptor = os.pidfd_open(link.endpoint.pid)
        except ProcessLookupError:
            link.lose("its process has ended")
            return
        self._watched[link] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._on_death, seat, link)
        if not lives(link.endpoint):
            self._on_death(seat, link)

    def _on_death(self, seat: Seat, link: AgentLink) -> None:
        self._unwatch(link)
        killed = read_endpoint(self._agents, seat.name) == link.endpoint  # at its end in order it removes the file
        seconds = LAST_REPORTS_SECONDS if killed else LAST_REPORTS_IN_ORDER_SECONDS
        asyncio.get_running_loop().call_later(seconds, link.lose, "its process has ended")

    def _unwatch(self, link: AgentLink) -> None:
        if (descriptor := self._watched.pop(link, None)) is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    async def fence(self, seat: Seat, endpoint: AgentEndpoint, patience: float = 0.0) -> bool:
        """See `AgentFleet.fence`: kills the agent, and what its guardians did not end."""
        for link in [link for link in self._watched if link.endpoint == endpoint]:
            self._unwatch(link)
        began, killed = time.monotonic(), False
        while lives(endpoint) and time.monotonic() - began < patience + DEATH_SECONDS:
            if not killed and time.monotonic() - began >= patience:
                killed = True
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(endpoint.pid, signal.SIGKILL)
            await asyncio.sleep(POLL_SECONDS)
        reap(endpoint.pid)
        lock = await self._lock_of_dead(seat.name, endpoint)
        if lock is None:
            return True  # another agent has the place, and ends what the earlier one left before it takes any command
        try:
            if left := await asyncio.to_thread(kill_marked, mark_of(self._agents, seat.name)):
                logger.error("processes of node %s cannot be killed: %s", seat.node, left)
        finally:
            os.close(lock)
        return True

    async def _lock_of_dead(self, name: str, endpoint: AgentEndpoint) -> int | None:
        """Takes the lock of an agent that has died; None if another one has it.

        An agent whose main thread is dead has its lock for a moment more, until all its threads are.
        """
        deadline = time.monotonic() + DEATH_SECONDS
        while True:
            try:
                return take_lock(lock_file(self._agents, name), "another agent has the place")
            except OSError:
                holder = read_endpoint(self._agents, name)
                if (holder is not None and holder != endpoint) or time.monotonic() > deadline:
                    return None
            await asyncio.sleep(POLL_SECONDS)

    # --- masters ---

    def handles(self) -> Mapping[str, Any]:
        """See `Backend.handles`: where each bundle is. The agents are found by their files."""
        return {
            f"bundle {name}": {"node": place.node, "total": dict(place.total), "devices": dict(place.devices)}
            for name, place in self._places.items()
        }

    async def adopt(self, handles: Mapping[str, Any]) -> Sequence[LivingWorker]:
        """See `Backend.adopt`."""
        for name, handle in handles.items():
            if name.startswith("bundle ") and handle["node"] in self._devices:
                self._places[name.removeprefix("bundle ")] = _Place(**handle)
        found: list[tuple[Seat, AgentEndpoint]] = []
        for path in sorted(self._agents.glob("*.json")):
            endpoint = read_endpoint(self._agents, path.stem)
            if endpoint is None:
                continue
            if agent_in(self._agents, path.stem) == endpoint:
                found.append((Seat(path.stem, endpoint.node), endpoint))
            elif not lives(endpoint):  # else this directory is a copy, and the agent is the original's
                await self.fence(Seat(path.stem, endpoint.node), endpoint)
        return await self.adopt_seats(found)

    async def close(self, *, end: bool) -> None:
        """See `Backend.close`."""
        try:
            await super().close(end=end)
        finally:
            for link in list(self._watched):
                self._unwatch(link)


def visible_devices() -> list[str]:
    """Returns the ids of this machine's accelerators: those in `CUDA_VISIBLE_DEVICES`, or what `nvidia-smi` names."""
    if (listed := os.environ.get(DEVICES)) is not None:
        return [device for device in listed.split(",") if device.strip() and device.strip() != "-1"]
    try:
        shown = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return shown.stdout.split() if shown.returncode == 0 else []
