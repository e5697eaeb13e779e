"""What a PrimeManager knows of its job: plain records, which a snapshot holds as JSON.

Nothing here is computed from something else; the counters over these records are in `ledger`, and are counted anew from a
snapshot. What may change together changes through the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from cluster.manager.events import ManagerStage, Outcome
from cluster.spec import JobSpec, sub_master_name, worker_name
from cluster.worker import Stage


class Phase(StrEnum):
    """Where a worker stands, in more detail than its `Stage`."""

    WAITING = "waiting"
    """To be created, once the roles that it starts after are ready and its bundle has a place."""
    CREATING = "creating"
    """`Create` is not answered yet."""
    INITIALIZING = "initializing"
    """Its process runs and is not ready."""
    READY = "ready"
    STARTING = "starting"
    """`Start` is not answered yet."""
    RUNNING = "running"
    FINISHED = "finished"
    """Its `start` has returned; its process lives."""
    STUCK = "stuck"
    """It failed to do something in time, or is to be replaced, and is being killed."""
    RECYCLING = "recycling"
    """Asked to end, to be created again with its role or job, or to be removed."""
    HELD = "held"
    """Dead, and created again once all that are recycled with it have ended."""
    RESTARTING = "restarting"
    """Dead, and created again at its deadline."""
    STOPPING = "stopping"
    """Asked to end for good, or killed for good."""
    STOPPED = "stopped"
    FAILED = "failed"
    REMOVED = "removed"
    """Its role has fewer workers now."""


ENDED = frozenset({Phase.STOPPED, Phase.FAILED, Phase.REMOVED})
DEAD = frozenset({Phase.WAITING, Phase.HELD, Phase.RESTARTING})
"""Without a process, and to be created."""
WELL = frozenset({Phase.INITIALIZING, Phase.READY, Phase.STARTING, Phase.RUNNING, Phase.FINISHED})
"""With a process that nobody has asked to end."""
ALIVE = WELL | {Phase.CREATING, Phase.STUCK, Phase.RECYCLING, Phase.STOPPING}
"""With a process, as far as is known."""
UNREADY = DEAD | {Phase.CREATING, Phase.INITIALIZING, Phase.STUCK, Phase.RECYCLING}

_STAGES = {
    Phase.READY: Stage.READY,
    Phase.STARTING: Stage.READY,
    Phase.RUNNING: Stage.RUNNING,
    Phase.STOPPING: Stage.RUNNING,
    Phase.FINISHED: Stage.FINISH,
    Phase.STOPPED: Stage.FINISH,
    Phase.REMOVED: Stage.FINISH,
    Phase.FAILED: Stage.FAILED,
}


@dataclass(slots=True)
class WorkerRecord:
    """One worker or SubMaster."""

    name: str
    role: str
    rank: int
    """-1 for a SubMaster."""
    task: bool
    bundle: str
    phase: Phase = Phase.WAITING
    incarnation: int = 0
    node: str = ""
    pid: int = 0
    address: str = ""
    server_key: str = ""
    deadline: float | None = None
    """When something is due: what, follows from the phase and the flags below."""
    unblocked: bool = False
    """Whether it may be created although a role that it starts after is not ready: it was created before."""
    launched: bool = False
    """Whether this incarnation has begun to work: `Start` was sent, or, for a command, it became ready."""
    ending: bool = False
    """Whether it has announced its end."""
    killed: bool = False
    """Whether it overran its time to stop, or the whole job is killed: no more time, and no further failure by its exit code."""
    settled: bool = False
    """For a task: whether its work is complete, or never will be since it failed."""
    stuck: str = ""
    """For one that is being killed: what it failed to do, for a person."""
    suspected: bool = False
    """Whether two heartbeats of this incarnation are missing."""
    ready_since: float | None = None
    deaths: int = 0
    """In a row."""
    restarts: int = 0
    """In all."""
    last_death: str = ""
    """How it died last, for a person."""
    notice: int = 0
    """The number of its last `Failover`."""
    noticed: list[str] = field(default_factory=list)
    """Whom that names, until it is answered."""
    to_notice: list[str] = field(default_factory=list)
    """Whom its next `Failover` is to name."""

    @property
    def stage(self) -> Stage:
        """The stage, as others see it. INIT, too, while it is being created again; FAILED: for good."""
        return _STAGES.get(self.phase, Stage.INIT)


@dataclass(slots=True)
class RoleRecord:
    """One role."""

    name: str
    wanted: int
    """Workers that it is to have."""
    check: int = 0
    """The number of the last `CheckChildren`."""
    checking: bool = False
    """Whether that is not answered, and nothing has happened since that makes it void."""
    checked: bool = False
    """Whether the workers of the role as they are now have passed."""
    deadline: float | None = None
    """When the check has to be over."""
    not_before: float = 0.0
    """When those that are recycled may be created again."""
    changed: list[str] = field(default_factory=list)
    """Workers that died and will have been created again, or left, and of whom nobody was told."""


class Place(StrEnum):
    """How far the placement of a bundle is."""

    NONE = "none"
    ALLOCATING = "allocating"
    """`Allocate` is not answered."""
    RETRYING = "retrying"
    """It could not be placed; tried again at its deadline."""
    ALLOCATED = "allocated"
    RELEASED = "released"


@dataclass(slots=True)
class BundleRecord:
    """Workers that are placed together."""

    name: str
    workers: list[str]
    place: Place = Place.NONE
    attempt: int = 0
    failures: int = 0
    """Attempts in a row that failed."""
    node: str = ""
    """Empty while it is not known."""
    deadline: float | None = None


@dataclass(slots=True)
class JobState:
    """The whole job."""

    stage: ManagerStage = ManagerStage.INIT
    begun: bool = False
    epoch: int = 0
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    roles: dict[str, RoleRecord] = field(default_factory=dict)
    bundles: dict[str, BundleRecord] = field(default_factory=dict)
    node_losses: dict[str, list[float]] = field(default_factory=dict)
    """When each node was lost lately."""
    set_aside: list[str] = field(default_factory=list)
    """Nodes that are used no more."""
    restarting_all: bool = False
    """Whether the whole job is being recycled."""
    guests: list[str] | None = None
    """None before the first look."""
    stop_requests: int = 0
    stop_requested_at: float | None = None
    stop_group: int = -1
    """Up to which group of workers (`ledger.stop_group`) all were asked to stop."""
    decided: Outcome | None = None
    """The outcome that the job is being stopped with; None until an event decides it."""
    failed_task: Outcome | None = None
    """The first task's failure: the job's, once the other tasks have ended as well."""
    outcome: Outcome | None = None
    """Set once everything has ended."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the state as JSON values, for a snapshot."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> JobState:
        """Returns the state of a snapshot. Raises `TypeError`, `KeyError` or `ValueError` if it is none."""
        values = dict(fields)
        values["stage"] = ManagerStage(values["stage"])
        values["workers"] = {
            name: WorkerRecord(**{**record, "phase": Phase(record["phase"])})
            for name, record in values["workers"].items()
        }
        values["roles"] = {name: RoleRecord(**record) for name, record in values["roles"].items()}
        values["bundles"] = {
            name: BundleRecord(**{**record, "place": Place(record["place"])})
            for name, record in values["bundles"].items()
        }
        for name in ("decided", "failed_task", "outcome"):
            values[name] = None if values[name] is None else Outcome(**values[name])
        return cls(**values)


def first_state(spec: JobSpec) -> JobState:
    """Returns the state of a job that has not begun."""
    state = JobState()
    for role in spec.roles:
        state.roles[role.name] = RoleRecord(role.name, role.count)
        if role.sub_master is not None:
            add_worker(state, spec, role.name, -1)
        for rank in range(role.count):
            add_worker(state, spec, role.name, rank)
    return state


def add_worker(state: JobState, spec: JobSpec, role_name: str, rank: int) -> WorkerRecord:
    """Adds a worker (rank -1: the SubMaster), and its bundle unless it shares one that exists. Returns its record.

    A collocation group has a place for as many workers as its roles may grow to, so that it never has to move for more.
    """
    role = spec.role(role_name)
    name = sub_master_name(role_name) if rank < 0 else worker_name(role_name, rank)
    group = role.collocate if rank >= 0 else None
    bundle = name if group is None else f"group:{group}"
    state.workers[name] = WorkerRecord(name, role_name, rank, task=role.task and rank >= 0, bundle=bundle)
    if bundle not in state.bundles:
        members = [
            worker_name(other.name, number)
            for other in spec.roles
            if group is not None and other.collocate == group
            for number in range(other.most)
        ]
        state.bundles[bundle] = BundleRecord(bundle, members or [name])
    return state.workers[name]
