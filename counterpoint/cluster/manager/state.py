"""What a PrimeManager knows of its job, and the tables of what may follow what: `TRANSITIONS`, `PLACES`, `STAGES`.

The records are plain, are not computed from anything else, and are what a snapshot holds as JSON. Only `JobLedger` changes
phases, places and stages: `JobLedger.move` gives a worker its next phase, with the deadline that the phase has, and returns
what the phase asks for. An index of the workers by phase makes that cost the same in any job; it follows from the records alone.
Which phase comes next is decided in `starting` and `ending`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from counterpoint.cluster.manager.events import Create, Instruction, Kill, ManagerStage, Outcome, Start, StopWorker
from counterpoint.cluster.member import Stage
from counterpoint.cluster.spec import JobSpec, RestartScope, RoleSpec, StartGate, sub_master_name, worker_name
from counterpoint.transport.typed import typed


class Phase(StrEnum):
    """The place of a worker in its life, in more detail than its `Stage`."""

    WAITING = "waiting"
    """It is to be created, once the roles that it starts after are ready and its bundle has a place."""
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
"""The worker has no process, and is to be created."""
WELL = frozenset({Phase.INITIALIZING, Phase.READY, Phase.STARTING, Phase.RUNNING, Phase.FINISHED})
"""The worker has a process that nobody has asked to end."""
ALIVE = WELL | {Phase.CREATING, Phase.STUCK, Phase.RECYCLING, Phase.STOPPING}
"""The worker has a process, as far as is known."""
UNREADY = DEAD | {Phase.CREATING, Phase.INITIALIZING, Phase.STUCK, Phase.RECYCLING}
NOT_RUNNING = UNREADY | {Phase.READY, Phase.STARTING}

_DOWN = frozenset({Phase.STUCK, Phase.RECYCLING, Phase.STOPPING, Phase.RESTARTING, Phase.STOPPED, Phase.FAILED})

TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.CREATING, Phase.STOPPED, Phase.REMOVED}),
    Phase.CREATING: _DOWN | {Phase.INITIALIZING, Phase.READY, Phase.RUNNING},
    Phase.INITIALIZING: _DOWN | {Phase.READY, Phase.RUNNING},
    Phase.READY: _DOWN | {Phase.STARTING},
    Phase.STARTING: _DOWN | {Phase.RUNNING, Phase.FINISHED, Phase.HELD},
    Phase.RUNNING: _DOWN | {Phase.FINISHED, Phase.HELD},
    Phase.FINISHED: _DOWN | {Phase.HELD, Phase.REMOVED},
    Phase.STUCK: (_DOWN | {Phase.HELD, Phase.REMOVED}) - {Phase.STUCK, Phase.RECYCLING},
    Phase.RECYCLING: (_DOWN | {Phase.HELD, Phase.REMOVED}) - {Phase.STUCK, Phase.RESTARTING},
    Phase.HELD: frozenset({Phase.RESTARTING, Phase.STOPPED, Phase.REMOVED}),
    Phase.RESTARTING: frozenset({Phase.WAITING, Phase.HELD, Phase.STOPPED, Phase.REMOVED}),
    Phase.STOPPING: frozenset({Phase.STOPPING, Phase.STOPPED, Phase.FAILED}),
    Phase.STOPPED: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.REMOVED: frozenset({Phase.WAITING}),
}
"""The phases that may follow each phase. Only one that is recycled or stopped stays where it is: it is killed."""

STAGES: dict[ManagerStage, frozenset[ManagerStage]] = {
    ManagerStage.INIT: frozenset({ManagerStage.INIT, ManagerStage.READY, ManagerStage.STOPPING}),
    ManagerStage.READY: frozenset({ManagerStage.RUNNING, ManagerStage.INIT, ManagerStage.STOPPING}),
    ManagerStage.RUNNING: frozenset({ManagerStage.INIT, ManagerStage.STOPPING}),
    ManagerStage.STOPPING: frozenset({ManagerStage.STOPPED}),
    ManagerStage.STOPPED: frozenset(),
}
"""The stages of the job that may follow each stage; INIT again, when the whole job is created again."""

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
    """The time when something is due: what it is follows from the phase and the flags below."""
    unblocked: bool = False
    """Whether it may be created although a role that it starts after is not ready: it was created before."""
    launched: bool = False
    """Whether this incarnation has begun to work: `Start` was sent, or, for a command, it became ready."""
    ending: bool = False
    """Whether it has announced its end."""
    killed: bool = False
    """Whether it overran its time to stop, or the whole job is killed: no more time, and no further failure by its exit code."""
    settled: bool = False
    """Whether the worker is a task whose work is complete, or never will be since it failed."""
    stuck: str = ""
    """What a worker that is being killed failed to do, for a person."""
    suspected: bool = False
    """Whether two heartbeats of this incarnation are missing."""
    ready_since: float | None = None
    was_ready: bool = False
    """Whether any incarnation of it was."""
    deaths: int = 0
    """Deaths in a row."""
    restarts: int = 0
    """The number of restarts in all."""
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
    """What is known of one role."""

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
    """The time when the check has to be over."""
    not_before: float = 0.0
    """The time when those that are recycled may be created again."""
    changed: list[str] = field(default_factory=list)
    """Workers that died and will have been created again, or left, and of whom nobody was told."""


class PlacementState(StrEnum):
    """How far the placement of a bundle is."""

    NONE = "none"
    ALLOCATING = "allocating"
    """`Allocate` is not answered."""
    RETRYING = "retrying"
    """It could not be placed; tried again at its deadline."""
    ALLOCATED = "allocated"
    RELEASED = "released"


PLACES: dict[PlacementState, frozenset[PlacementState]] = {
    PlacementState.NONE: frozenset({PlacementState.ALLOCATING}),
    PlacementState.ALLOCATING: frozenset({PlacementState.ALLOCATED, PlacementState.RETRYING, PlacementState.RELEASED}),
    PlacementState.RETRYING: frozenset({PlacementState.ALLOCATING, PlacementState.ALLOCATED, PlacementState.RELEASED}),
    PlacementState.ALLOCATED: frozenset({PlacementState.ALLOCATING, PlacementState.RELEASED}),
    PlacementState.RELEASED: frozenset({PlacementState.ALLOCATING}),
}
"""How the placement of a bundle may go on; after a try that failed, its place may still be found."""


@dataclass(slots=True)
class BundleRecord:
    """Workers that are placed together."""

    name: str
    workers: list[str]
    place: PlacementState = PlacementState.NONE
    attempt: int = 0
    failures: int = 0
    """Attempts in a row that failed."""
    node: str = ""
    """Empty while it is not known."""
    deadline: float | None = None


@dataclass(slots=True)
class JobState:
    """What is known of the whole job."""

    stage: ManagerStage = ManagerStage.INIT
    begun: bool = False
    epoch: int = 0
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    roles: dict[str, RoleRecord] = field(default_factory=dict)
    bundles: dict[str, BundleRecord] = field(default_factory=dict)
    node_losses: dict[str, list[float]] = field(default_factory=dict)
    """The times when each node was lost lately."""
    set_aside: list[str] = field(default_factory=list)
    """Nodes that are used no more."""
    restarting_all: bool = False
    """Whether the whole job is being recycled."""
    guests: list[str] | None = None
    """None before the first look."""
    stop_requests: int = 0
    stop_requested_at: float | None = None
    stop_group: int = -1
    """Up to which group of workers (`JobLedger.stop_group`) all were asked to stop."""
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
        """Returns the state of a snapshot. Raises `ValueError`, which says what is wrong, if it is none of this version."""
        state = typed(fields, cls, "the snapshot", ValueError)
        if state.to_dict() != fields:  # what it lacks has a value now, and what only it has is left out
            raise ValueError("the snapshot has other fields than a job's state has in this version")
        return state


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


# --- the records with their index and deadlines ---

ANSWER_SECONDS = 120.0
"""Longest time for a worker's process to be created, and for `start` to be called; else it is killed."""

CREATIONS_AT_ONCE = 16
"""Creations that are carried out at a time; the others wait, and their deadlines are later. A keeper starts one process after the
other, so more would only wait there, beside their repetitions."""

KILL_GRACE_SECONDS = 15.0
"""A killed process on a node that can be reached, and that exists after this, is stuck in the kernel."""

FENCE_LEASES = 3
"""A node that cannot be reached has shown its silence, and ended its workers by itself, after so many leases of the job."""

_LEFT_BEHIND = 64
"""Entries of the heap that may be void before it is looked over."""

Timed = WorkerRecord | RoleRecord | BundleRecord
"""What may have a deadline."""


def asked(worker: WorkerRecord) -> list[Instruction]:
    """Returns what a worker's phase asks for: instructed when the worker gets there, and again by a new master."""
    match worker.phase:
        case Phase.CREATING:
            return [Create(worker.name, worker.incarnation, worker.bundle, again=worker.incarnation > 1)]
        case Phase.STARTING:
            return [Start(worker.name, worker.incarnation)]
        case Phase.STOPPING | Phase.RECYCLING if not worker.killed:
            return [StopWorker(worker.name, worker.incarnation)]
        case Phase.STUCK | Phase.STOPPING | Phase.RECYCLING:
            return [Kill(worker.name, worker.incarnation)]
    return []


class JobLedger:
    """A job's state, its workers by phase, and its deadlines."""

    def __init__(self, spec: JobSpec, state: JobState) -> None:
        self.spec = spec
        self.state = state
        self.roles = {role.name: role for role in spec.roles}
        self.dependents: dict[str, list[str]] = {
            role.name: [other.name for other in spec.roles if role.name in other.after] for role in spec.roles
        }
        self._stop_order = spec.stop_order()
        self.linked_by_channels = spec.linked_by_channels
        self._by_phase: dict[str, dict[Phase, set[str]]] = {
            name: {each: set() for each in Phase} for name in self.roles
        }
        """The workers of each role that were ever added, its SubMaster included."""
        self._in_phase = dict.fromkeys(Phase, 0)
        """How many workers of the job are in each phase."""
        self.left_in_group: dict[int, int] = defaultdict(int)
        """Workers of each stop group that have not ended; group 0 is the tasks."""
        self.left_in_bundle: dict[str, int] = defaultdict(int)
        """Workers of each bundle that have not ended."""
        self.bundles_on: dict[str, set[str]] = defaultdict(set)
        self.changes: dict[str, None] = {}
        """Workers whose `Member` may have changed since this was last emptied."""
        self._heap: list[tuple[float, str, str, int, Timed]] = []
        self._entries = itertools.count()
        for record in state.workers.values():
            self.index(record, 1)
        for bundle in state.bundles.values():
            if bundle.node:
                self.bundles_on[bundle.node].add(bundle.name)
        self._refill_heap()
        self._timed = len(self._heap)
        """How many records have a deadline; other entries of the heap are void."""

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

    def at(self, role: str, phases: Iterable[Phase] = Phase) -> list[WorkerRecord]:
        """Returns the role's workers in these phases, its SubMaster first, then by rank."""
        found = (self.state.workers[name] for phase in phases for name in self._by_phase[role][phase])
        return sorted(found, key=lambda record: record.rank)

    def number(self, phases: Iterable[Phase], role: str | None = None) -> int:
        """Returns how many workers of the role, its SubMaster included, or of the whole job, are in these phases."""
        if role is None:
            return sum(self._in_phase[phase] for phase in phases)
        return sum(len(self._by_phase[role][phase]) for phase in phases)

    def stop_group(self, record: WorkerRecord) -> int:
        """Returns when a worker is stopped: group 0, the tasks, at once; then as `JobSpec.stop_order` says, a SubMaster last."""
        return 0 if record.task else 2 * self._stop_order[record.role] - (record.rank >= 0)

    def in_stop_group(self, group: int) -> list[WorkerRecord]:
        """Returns the workers of that group, in the order in which they start."""
        order = (group + 1) // 2
        roles = [name for name in self.roles if group == 0 or self._stop_order.get(name) == order]
        return [worker for role in roles for worker in self.at(role) if self.stop_group(worker) == group]

    def is_passed(self, role: str) -> bool:
        """Whether the role's workers are ready, and its SubMaster has checked them, or has ended for good."""
        if self.number(UNREADY, role):
            return False
        sub_master = self.sub_master(role)
        return sub_master is None or self.state.roles[role].checked or sub_master.phase in ENDED

    def is_awaited(self, role: str) -> bool:
        """Whether the workers of roles that start after this one have to wait for it."""
        alone = self.roles[role].start is StartGate.WORKER
        return not self.is_passed(role) if alone else self.number(UNREADY, role) > 0

    @property
    def last_stop_group(self) -> int:
        """The number of the last group."""
        return 2 * max(self._stop_order.values(), default=0)

    @property
    def stops(self) -> bool:
        """Whether the job is being stopped, or has ended."""
        return self.state.stage in (ManagerStage.STOPPING, ManagerStage.STOPPED)

    @property
    def kill_grace(self) -> float:
        """How long the end of a killed worker may take; after it the job goes on without the worker, and reports it."""
        return KILL_GRACE_SECONDS + FENCE_LEASES * self.spec.lease_seconds

    # --- changing ---

    def move(self, worker: WorkerRecord, phase: Phase, at: float) -> list[Instruction]:
        """Brings a worker into its next phase, which may last until the phase's deadline. Returns what the phase asks for.

        One that has announced its end keeps the deadline of that while it is well.
        """
        role, deadline = self.roles[worker.role], None
        match phase:
            case _ if worker.ending and phase in WELL:
                deadline = worker.deadline
            case Phase.CREATING:
                deadline = at + (1 + self._in_phase[phase] // CREATIONS_AT_ONCE) * ANSWER_SECONDS
            case Phase.INITIALIZING:
                deadline = at + (role.ready_timeout_seconds or math.inf)
            case Phase.STARTING:
                deadline = at + ANSWER_SECONDS
            case Phase.STUCK:
                deadline = at + self.kill_grace
            case Phase.STOPPING | Phase.RECYCLING:
                deadline = at + (self.kill_grace if worker.killed else role.stop_timeout_seconds)
        self.set_phase(worker, phase, deadline)
        return asked(worker)

    def set_phase(self, record: WorkerRecord, phase: Phase, deadline: float | None = None) -> None:
        """Sets a worker's phase and deadline: the only place that does."""
        assert phase in TRANSITIONS[record.phase], f"{record.name} cannot go from {record.phase} to {phase}"
        self.index(record, -1)
        record.phase = phase
        self.index(record, 1)
        record.ending = record.ending and phase in WELL
        self.set_deadline(record, deadline)
        role = self.state.roles[record.role]
        if phase in UNREADY or (record.rank < 0 and phase in ENDED and role.checking):
            self.void_check(role)

    def void_check(self, role: RoleRecord) -> None:
        """Notes that the role's last check says nothing about its workers of now."""
        role.checked = role.checking = False
        self.set_deadline(role, None)

    def set_stage(self, stage: ManagerStage) -> None:
        """Sets the job's stage."""
        assert stage in STAGES[self.state.stage], f"the job cannot go from {self.state.stage} to {stage}"
        self.state.stage = stage

    def set_place(
        self, bundle: BundleRecord, place: PlacementState, deadline: float | None = None, node: str = ""
    ) -> None:
        """Sets how far a bundle's placement is, and where it is, if that is known."""
        assert place in PLACES[bundle.place], f"{bundle.name} cannot go from {bundle.place} to {place}"
        bundle.place = place
        self.set_deadline(bundle, deadline)
        self.set_node(bundle, node)

    def set_node(self, bundle: BundleRecord, node: str) -> None:
        """Notes where a bundle is; empty: nowhere."""
        self.bundles_on[bundle.node].discard(bundle.name)
        if not self.bundles_on[bundle.node]:
            del self.bundles_on[bundle.node]
        bundle.node = node
        if node:
            self.bundles_on[node].add(bundle.name)

    def index(self, record: WorkerRecord, sign: int) -> None:
        """Puts a worker into the index, or takes it out."""
        names = self._by_phase[record.role][record.phase]
        (names.add if sign > 0 else names.discard)(record.name)
        self._in_phase[record.phase] += sign
        self.changes[record.name] = None
        if record.phase not in ENDED:
            self.left_in_group[self.stop_group(record)] += sign
            self.left_in_bundle[record.bundle] += sign

    # --- deadlines ---

    def set_deadline(self, record: Timed, deadline: float | None) -> None:
        """Sets when something is due; None, or never: nothing is."""
        deadline = None if deadline == math.inf else deadline
        if record.deadline == deadline:
            return
        self._timed += (deadline is not None) - (record.deadline is not None)
        record.deadline = deadline
        self._push(record)
        if len(self._heap) > 2 * self._timed + _LEFT_BEHIND:
            self._heap.clear()
            self._refill_heap()

    def _push(self, record: Timed) -> None:
        if record.deadline is not None:
            entry = (record.deadline, type(record).__name__, record.name, next(self._entries), record)
            heapq.heappush(self._heap, entry)

    def _refill_heap(self) -> None:
        state = self.state
        records: list[Timed] = [*state.bundles.values(), *state.roles.values(), *state.workers.values()]
        for record in records:
            self._push(record)

    @property
    def deadline(self) -> float | None:
        """The earliest deadline."""
        while self._heap:
            at, *_, record = self._heap[0]
            if record.deadline == at:
                return at
            heapq.heappop(self._heap)
        return None

    def take_due(self, at: float) -> Timed | None:
        """Returns the first of those that are due, without its deadline."""
        deadline = self.deadline
        if deadline is None or deadline > at:
            return None
        record = heapq.heappop(self._heap)[-1]
        self._timed -= 1
        record.deadline = None
        return record
