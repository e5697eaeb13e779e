"""The contract of a backend: it places, creates, stops, kills and reports. It never restarts anything by itself.

The local backend, over keepers (`transport/process/keeper`), and that for Ray, over actors, implement it; users may name
another by import path. One suite of tests (`tests/cluster/backends`) runs against each. Every method is idempotent, carries out
orders of the highest epoch only, and raises `StaleMasterError` once a keeper has obeyed a higher one. What happens to workers
arrives by `events`, as the manager's own events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from counterpoint.cluster.backends.order import LivingWorker, WorkerOrder
from counterpoint.cluster.manager.events import Event
from counterpoint.cluster.member import Member
from counterpoint.cluster.spec import Resources


@dataclass(frozen=True, slots=True)
class Bundle:
    """Workers that are placed together on one node, all or none; a worker without a collocation group is one alone."""

    name: str
    needs: Mapping[str, Resources]
    """The needs of each worker."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, or what a backend takes for one."""

    name: str
    alive: bool
    resources: Mapping[str, float]
    """`cpu`, `gpu`, `memory_bytes` and custom ones, in total."""


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    """A worker's heartbeat, or its status line: no event."""

    worker: str
    incarnation: int
    status: str = ""
    trouble: str = ""
    pid: int = 0
    """The command's own process id; 0 if it is not known yet."""
    alive: bool = True
    """False: only news of it, and no sign of life."""


class Backend(Protocol):
    """Places and runs workers. Made by the master with the job's spec, directory and epoch."""

    async def check_capacity(self, bundles: Sequence[Bundle]) -> None:
        """Compares all bundles with the totals, before anything starts. Raises `CapacityError`."""

    async def allocate(self, bundle: Bundle, avoid: Sequence[str]) -> None:
        """Reserves a place. Raises `CapacityError` if it can never fit, `BackendError` if it cannot now."""

    async def create(self, order: WorkerOrder) -> None:
        """Starts the worker's process in its bundle's place; `Created` or `CreateFailed` follows. Raises `BackendError`."""

    async def start(self, worker: str, incarnation: int) -> None:
        """Has the worker call `start`; `WorkerStarted` follows."""

    async def check_children(self, worker: str, incarnation: int, check: int, children: Sequence[Member]) -> None:
        """Has a SubMaster call `check_child`; `ChildrenChecked` follows, or its end."""

    async def failover(self, worker: str, incarnation: int, notice: int, failed: Sequence[Member]) -> None:
        """Has the worker call `on_failover`; `FailoverDone` follows, or its end."""

    async def publish(self, members: Sequence[Member]) -> None:
        """Sends the changed members to every living worker, for its RoleGroups. Later news replaces earlier."""

    async def stop(self, worker: str, incarnation: int) -> None:
        """Asks the worker to end. `WorkerExited` follows; at once if there is no such process."""

    async def kill(self, worker: str, incarnation: int) -> None:
        """Kills the worker and everything below it. `WorkerExited` follows; at once if there is no such process."""

    async def release(self, bundle: str) -> None:
        """Gives a place back, whatever is in it is killed."""

    def events(self) -> AsyncIterator[Event | WorkerHeartbeat]:
        """Yields what happens, each event at least once until `acknowledge`d, in order for each worker."""

    async def acknowledge(self, event: Event | WorkerHeartbeat) -> None:
        """Tells the backend that what follows from an event is durable (or it was stale), so that it need not be repeated."""

    def handles(self) -> Mapping[str, Any]:
        """Returns what a later master needs to find the keepers again (JSON values, no secrets); kept with its state."""

    async def adopt(self, handles: Mapping[str, Any]) -> Sequence[LivingWorker]:
        """Connects to the keepers of an earlier master, in the name of the new epoch; returns every worker that lives.

        What was reported and not acknowledged is among the `events` when this returns. A worker whose keeper is gone by then is
        not told as lost: it is neither among those that live nor among the events.
        """

    async def nodes(self) -> Sequence[Node]:
        """Returns the nodes."""

    async def close(self, *, end: bool) -> None:
        """Disconnects. With `end`, ends every keeper and removes every actor and placement group of the job, too."""
