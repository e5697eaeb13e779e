"""What a user writes: subclasses of `Worker` and `SubMaster`, whose hooks the worker's process calls in order.

The stages of a worker are INIT, READY, RUNNING, and FINISH or FAILED. `counterpoint/cluster/worker_process` calls `__init__` and
`setup` in INIT, then `self_check`; the worker is then READY. Once the whole job is READY, `start` runs and the worker is RUNNING.
A task is FINISH when `start` has returned, and `stop` is called; a service stays RUNNING until the job stops it. A worker whose
hook raises, or whose process ends otherwise, is FAILED; by its role's restart scope it is created again, with the next
incarnation.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from counterpoint.cluster.member import Member, Stage

if TYPE_CHECKING:
    from counterpoint.cluster.calls.group import RoleGroup

__all__ = ["Context", "Member", "Stage", "SubMaster", "WorkLoad", "Worker"]


@dataclass(slots=True)
class Context:
    """What a worker's process knows of itself and of its job."""

    job: str
    role: str
    rank: int
    """-1 for a SubMaster."""
    count: int
    """Workers of its role when it was created."""
    worker: str
    """The name of this worker."""
    incarnation: int
    """1 at first; counts how often it was created."""
    config: Mapping[str, Any]
    """The role's `config`."""
    directory: str
    """The job's directory, on this node."""
    node: str
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the worker is to end: `start` should return soon after."""
    fewest: int = 1
    """Fewest workers that its role may have."""
    most: int = sys.maxsize
    """Most workers that its role may have."""
    left_open: dict[str, Callable[[], bool]] = field(default_factory=dict)
    """Whether each of these is not ended, by name: a task that returns without has not completed its work."""

    def group(self, role: str) -> RoleGroup:
        """Returns the workers of a role, to be called; the SubMaster of role `r` is the only one of `r-master`."""
        raise NotImplementedError("set by the worker's process")

    def get_nodes_by_role(self, role: str) -> Sequence[Member]:
        """Returns the workers of a role as last known here, by rank; its SubMaster is not among them."""
        raise NotImplementedError("set by the worker's process")

    def replace(self, worker: str, incarnation: int, reason: str) -> None:
        """Asks the PrimeMaster to kill a worker and create it again. Only a SubMaster may, for its own role.

        Ignored if the worker has another incarnation by now.
        """
        raise NotImplementedError("set by the worker's process")

    def scale(self, count: int) -> None:
        """Asks the PrimeMaster for so many workers, from `fewest` to `most`. Only a SubMaster may, for its own role."""
        raise NotImplementedError("set by the worker's process")

    def stop_job(self, reason: str, code: int = 0) -> None:
        """Asks the PrimeMaster to stop the job in order, with that exit code."""
        raise NotImplementedError("set by the worker's process")


class Worker:
    """The base of a role's workers: the user's work load. `WorkLoad` is another name of it."""

    def __init__(self, context: Context) -> None:
        """Takes the context. When it raises, the worker is FAILED with the traceback's last line as the reason."""
        self.context = context

    def setup(self) -> None:
        """Loads and connects what the worker needs; called once, in INIT. When it raises, the worker is FAILED."""
        self._setup()

    def _setup(self) -> None:
        """Another name of `setup`."""

    def self_check(self) -> None:
        """Raises if the worker or its node is not fit to run; called after `setup`, before READY. The worker is then FAILED."""
        self._self_check()

    def _self_check(self) -> None:
        """Another name of `self_check`."""

    def status(self) -> str:
        """Returns one line about what the worker does, for people.

        Called every few seconds, in another thread than `start`. When it raises, the line says so; the worker goes on.
        """
        return ""

    def start(self) -> None:
        """Does the work; called once the whole job is READY, in the main thread. When it returns, a task is FINISH.

        When it raises, the worker is FAILED and is created again within its role's budget. `SystemExit` counts as the end of the
        process with that code, with 0 too: the work of a task is complete only when `start` has returned. A service may return
        at once: it then goes on to answer calls until it is stopped.
        """

    def stop(self) -> None:
        """Ends the work in order; called once, after `context.stop` is set, while `start` may still run, in another thread.

        After a task whose `start` has returned by itself it is called in the thread of `start`.
        When it raises, that is logged and the process ends with code 1. After the role's `stop_timeout_seconds` it is killed.
        """

    def on_failover(self, failed: Sequence[Member]) -> None:
        """Handles `failed` workers, which died and were created again, or left. It must be idempotent: it may be repeated.

        Called in the role's SubMaster, and after a restart of scope `role` also in the roles that start after that one; in a
        thread of its own, one call at a time. When it raises, the worker is FAILED.
        """


WorkLoad = Worker


class SubMaster(Worker):
    """A worker that manages the workers of one role: `context.role` is theirs."""

    def check_child(self, children: Sequence[Member]) -> None:
        """Raises unless the workers of its role are fit; called when all of them are READY, before the job is READY.

        Called again after any of them was created again. When it raises, the SubMaster is FAILED; to have a child created again
        instead, it calls `context.replace`, and is called again once the child is READY.
        """
