"""What a PrimeManager knows of its job: plain records, which a snapshot holds as JSON.

The records are not computed from anything else. `Ledger` is these records with their counters: every change of a worker's
phase goes through it, and costs the same in any job. The counters and sets follow from the records alone, and are counted anew
when a snapshot is read. The rules that read and change them are in `starting`, `restarts` and `stopping`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from counterpoint.cluster.manager.events import ManagerStage, Outcome
from counterpoint.cluster.spec import JobSpec, RestartScope, RoleSpec, StartGate, sub_master_name, worker_name
from counterpoint.cluster.worker import Stage


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
        """The stage, as others see it. INIT, too, while it is being created again; FAILED: for good.

        A service whose `start` has returned still works: it takes calls until it is stopped.
        """
        if self.phase is Phase.FINISHED and not self.task:
            return Stage.RUNNING
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
    """Up to which group of workers (`Ledger.stop_group`) all were asked to stop."""
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


# --- the records with their counters ---

_LEFT_BEHIND = 64
"""Entries of the heap that may be void before it is looked over."""

Timed = WorkerRecord | RoleRecord | BundleRecord
"""What may have a deadline."""


class Ledger:
    """A job's state and what is counted of it."""

    def __init__(self, spec: JobSpec, state: JobState) -> None:
        self.spec = spec
        self.state = state
        self.roles = {role.name: role for role in spec.roles}
        self.dependents: dict[str, list[str]] = {
            role.name: [other.name for other in spec.roles if role.name in other.after] for role in spec.roles
        }
        self._position = {role.name: position for position, role in enumerate(spec.roles)}
        self._stop_order = spec.stop_order()
        self.linked_by_channels = spec.linked_by_channels
        self.members: dict[str, list[str]] = {name: [] for name in self.roles}
        """Workers of each role that were ever added, its SubMaster included."""
        self.unready = dict.fromkeys(self.roles, 0)
        """Workers of each role that are not ready, its SubMaster included."""
        self.unended = dict.fromkeys(self.roles, 0)
        """Workers of each role that have not ended, its SubMaster not included."""
        self.recycling = dict.fromkeys(self.roles, 0)
        self.waiting: dict[str, set[str]] = {name: set() for name in self.roles}
        self.held: dict[str, set[str]] = {name: set() for name in self.roles}
        self.to_start: dict[str, set[str]] = {name: set() for name in self.roles}
        self.not_passed: set[str] = set()
        """Roles that are not ready: a worker is not, or its SubMaster has not passed it."""
        self.not_running = 0
        """Workers that have not begun to work."""
        self.creating = 0
        """Workers whose processes were asked for."""
        self.unended_tasks = 0
        self.alive_in_group: dict[int, int] = defaultdict(int)
        self.left_in_bundle: dict[str, int] = defaultdict(int)
        """Workers of each bundle that have not ended."""
        self.bundles_on: dict[str, set[str]] = defaultdict(set)
        self.changes: dict[str, None] = {}
        """Workers whose `Member` may have changed since this was last emptied."""
        self._heap: list[tuple[float, str, str]] = []
        self._tables: dict[str, Mapping[str, Timed]] = {
            "worker": state.workers,
            "role": state.roles,
            "bundle": state.bundles,
        }
        self._timed = 0
        for record in state.workers.values():
            self.members[record.role].append(record.name)
            self._count(record, 1)
        for bundle in state.bundles.values():
            if bundle.node:
                self.bundles_on[bundle.node].add(bundle.name)
        for name in self.roles:
            self.review(name)
        self._refill_heap()

    # --- reading ---

    def spec_of(self, record: WorkerRecord) -> RoleSpec:
        """Returns the worker's role."""
        return self.roles[record.role]

    def scope_of(self, record: WorkerRecord) -> RestartScope:
        """Returns what is created again when this worker dies at work; a SubMaster's children always go on."""
        return RestartScope.WORKER if record.rank < 0 else self.roles[record.role].restart

    def sub_master(self, role: str) -> WorkerRecord | None:
        """Returns the role's SubMaster, if it has one."""
        return self.state.workers[sub_master_name(role)] if self.roles[role].sub_master is not None else None

    def current(self, worker: str, incarnation: int) -> WorkerRecord | None:
        """Returns the worker if it lives with that incarnation, as far as is known."""
        record = self.state.workers.get(worker)
        return record if record is not None and record.incarnation == incarnation and record.phase in ALIVE else None

    def in_order(self, names: Iterable[str]) -> list[WorkerRecord]:
        """Returns workers in the order in which they start: by role, the SubMaster first, then by rank."""
        return sorted((self.state.workers[name] for name in names), key=self.order)

    def order(self, record: WorkerRecord) -> tuple[int, int]:
        """The sort key of that order."""
        return self._position[record.role], record.rank

    def stop_group(self, record: WorkerRecord) -> int:
        """Returns when a worker is stopped: group 0, the tasks, at once; then as `JobSpec.stop_order` says, a SubMaster last."""
        return 0 if record.task else 2 * self._stop_order[record.role] - (record.rank >= 0)

    def in_stop_group(self, group: int) -> list[str]:
        """Returns the workers of that group."""
        roles = [name for name, order in self._stop_order.items() if order == (group + 1) // 2] if group else self.roles
        names = (name for role in roles for name in self.members[role])
        return [name for name in names if self.stop_group(self.state.workers[name]) == group]

    def is_awaited(self, role: str) -> bool:
        """Whether the workers of roles that start after this one have to wait for it."""
        return role in self.not_passed if self.roles[role].start is StartGate.WORKER else self.unready[role] > 0

    @property
    def last_stop_group(self) -> int:
        """The number of the last group."""
        return 2 * max(self._stop_order.values(), default=0)

    @property
    def stops(self) -> bool:
        """Whether the job is being stopped, or has ended."""
        return self.state.stage in (ManagerStage.STOPPING, ManagerStage.STOPPED)

    # --- changing ---

    def add(self, record: WorkerRecord) -> None:
        """Counts a worker that was added to the state."""
        self.members[record.role].append(record.name)
        self._count(record, 1)
        self.review(record.role)

    def set_phase(self, record: WorkerRecord, phase: Phase, deadline: float | None = None) -> None:
        """Moves a worker on. Its deadline is the given one, and none unless given."""
        self._count(record, -1)
        record.phase = phase
        self._count(record, 1)
        self.set_deadline(record, deadline)
        role = self.state.roles[record.role]
        if phase in UNREADY or (record.rank < 0 and phase in ENDED and role.checking):
            self.void_check(role)
        self.review(record.role)

    def void_check(self, role: RoleRecord) -> None:
        """Notes that the role's last check says nothing about its workers of now."""
        role.checked = role.checking = False
        self.set_deadline(role, None)
        self.review(role.name)

    def review(self, name: str) -> None:
        """Notes whether a role is ready; one whose SubMaster has ended for good is as it is."""
        sub_master = self.sub_master(name)
        checked = sub_master is None or self.state.roles[name].checked or sub_master.phase in ENDED
        if self.unready[name] == 0 and checked:
            self.not_passed.discard(name)
        else:
            self.not_passed.add(name)

    def set_node(self, bundle: BundleRecord, node: str) -> None:
        """Notes where a bundle is; empty: nowhere."""
        if node == bundle.node:
            return
        self.bundles_on[bundle.node].discard(bundle.name)
        if not self.bundles_on[bundle.node]:
            del self.bundles_on[bundle.node]
        bundle.node = node
        if node:
            self.bundles_on[node].add(bundle.name)

    def _count(self, record: WorkerRecord, sign: int) -> None:
        role, phase = record.role, record.phase
        self.changes[record.name] = None
        self.unready[role] += sign * (phase in UNREADY)
        self.recycling[role] += sign * (phase is Phase.RECYCLING)
        self.creating += sign * (phase is Phase.CREATING)
        self.not_running += sign * (phase in UNREADY or phase in (Phase.READY, Phase.STARTING))
        for sets, belongs in ((self.waiting, Phase.WAITING), (self.held, Phase.HELD), (self.to_start, Phase.READY)):
            if phase is belongs:
                (sets[role].add if sign > 0 else sets[role].discard)(record.name)
        if phase not in ENDED:
            self.unended_tasks += sign * record.task
            self.unended[role] += sign * (record.rank >= 0)
            self.alive_in_group[self.stop_group(record)] += sign
            self.left_in_bundle[record.bundle] += sign

    # --- deadlines ---

    def set_deadline(self, record: Timed, deadline: float | None) -> None:
        """Sets when something is due; None: nothing is."""
        if record.deadline == deadline:
            return
        self._timed += (deadline is not None) - (record.deadline is not None)
        record.deadline = deadline
        if deadline is not None:
            heapq.heappush(self._heap, (deadline, _kind(record), record.name))
            if len(self._heap) > 2 * self._timed + _LEFT_BEHIND:
                self._refill_heap()

    @property
    def deadline(self) -> float | None:
        """The earliest deadline."""
        while self._heap:
            at, kind, name = self._heap[0]
            if self._tables[kind][name].deadline == at:
                return at
            heapq.heappop(self._heap)
        return None

    def take_due(self, at: float) -> Timed | None:
        """Returns the first of those that are due, without its deadline."""
        deadline = self.deadline
        if deadline is None or deadline > at:
            return None
        _, kind, name = heapq.heappop(self._heap)
        record = self._tables[kind][name]
        self._timed -= 1
        record.deadline = None
        return record

    def _refill_heap(self) -> None:
        self._heap = [
            (record.deadline, kind, name)
            for kind, table in self._tables.items()
            for name, record in table.items()
            if record.deadline is not None
        ]
        self._timed = len(self._heap)
        heapq.heapify(self._heap)


def _kind(record: Timed) -> str:
    return "worker" if isinstance(record, WorkerRecord) else "role" if isinstance(record, RoleRecord) else "bundle"
