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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from counterpoint.cluster.backends.base import Bundle, Node
from counterpoint.cluster.backends.capacity import choose, require_capacity, total_of
from counterpoint.cluster.backends.keeper_link import SUFFIX, WORKERS, KeeperLink
from counterpoint.cluster.backends.kept import KeptBackend
from counterpoint.cluster.backends.link import LEASES_OF_THE_FENCE
from counterpoint.cluster.backends.order import LivingWorker, WorkerOrder
from counterpoint.cluster.devices import DEVICES, visible_devices
from counterpoint.cluster.errors import BackendError, StaleMasterError
from counterpoint.cluster.log_rotation import rotate_if_full
from counterpoint.cluster.remains import has_agents_of_old
from counterpoint.cluster.spec import JobSpec
from counterpoint.transport.config import machine_memory
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.own_directory import remove_left
from counterpoint.transport.process.keeper.main import EPOCH_FILE, epoch_in
from counterpoint.transport.process.launch import SHARED_TMPDIR, TEMPORARY

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""How long the first answer of an earlier master's keeper is waited for."""

LOOK_SECONDS = 0.5
"""Seconds between two looks at whether an earlier version's agents have ended."""

ROTATION_SECONDS = 5.0
"""How often logs are looked at."""

OLD_LEASES = 3.0
"""Leases within which what an earlier version of the product left has ended by itself."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a bundle."""

    node: str
    total: Mapping[str, float]
    devices: Mapping[str, str] = field(default_factory=dict)
    """The accelerators of its workers, as `CUDA_VISIBLE_DEVICES`."""


class LocalBackend(KeptBackend[KeeperLink]):
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
        super().__init__(job, epoch, clock)
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

    async def _link_for(self, order: WorkerOrder) -> tuple[KeeperLink, WorkerOrder]:
        """See `KeptBackend._link_for`: the worker gets the accelerators of its place."""
        place = self._places.get(order.bundle)
        if place is None:
            raise BackendError(f"{order.worker} cannot be created: bundle {order.bundle} has no place")
        devices = place.devices.get(order.worker)
        if devices is not None and DEVICES not in order.environment:
            order = replace(order, environment={**order.environment, DEVICES: devices})
        path = self._folder / f"{order.worker}.{order.incarnation}.{self.epoch}{SUFFIX}"
        return KeeperLink(path, place.node, order.bundle, self._clock, self._take), order

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
            seconds = LEASES_OF_THE_FENCE * self.job.lease_seconds
            logger.warning("waiting %g s, within which all ends that a master on another machine left", seconds)
            await asyncio.sleep(seconds)
        # Keepers that were killed leave them.
        temporary = Path(os.environ.get(SHARED_TMPDIR) or tempfile.gettempdir())
        await asyncio.to_thread(remove_left, temporary, TEMPORARY)
        await self._wait_for_old()
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            link = KeeperLink(path, "", "", self._clock, self._take)
            try:
                await link.find(self.epoch, self.job.lease_seconds)
            except OSError:  # it was killed
                await link.bury()
                continue
            self._attend(link)
        self._begin(self._rotate())
        found = list(self.links.values())
        living = await self._adopt_links(found, CONNECT_SECONDS)
        await asyncio.gather(*(link.gone.wait() for link in found if link.silent))
        return living

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
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            raise BackendError(f"{self._folder.parent}: what an earlier version left there does not end") from None
