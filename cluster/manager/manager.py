"""The PrimeManager: every decision about a job, without clock or I/O. Events in, instructions out.

Its state is the fold of the events it was given, so whoever journals these can have it again (`state` for a snapshot). It
neither waits nor asks: when something is due it says so by `deadline`, and is given a `Tick`. An event costs the same in a job
of ten workers and of ten thousand; what concerns many workers costs as much as those are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from counterpoint.cluster.manager.events import (
    Allocated,
    AllocationFailed,
    Begin,
    CheckChildren,
    ChildrenChecked,
    Created,
    CreateFailed,
    EndAnnounced,
    Event,
    ExtensionRequested,
    FailoverDone,
    GuestsChanged,
    Instruction,
    Kill,
    ManagerStage,
    MasterChanged,
    NodeLost,
    Outcome,
    Release,
    ReplaceRequested,
    ScaleRequested,
    Start,
    Stop,
    StopRequested,
    Tick,
    WorkerExited,
    WorkerHeard,
    WorkerReady,
    WorkerSilent,
    WorkerStarted,
    WorkerSuspected,
    WorkFinished,
)
from counterpoint.cluster.manager.restarts import (
    create_failed,
    end_announced,
    exited,
    extension_requested,
    kill_stuck,
    make_room,
    node_lost,
    overdue,
    replace_requested,
    scale,
    silent,
    suspect,
)
from counterpoint.cluster.manager.starting import (
    allocate,
    allocated,
    became_ready,
    begin,
    children_checked,
    created,
    creation,
    failover_done,
    finished,
    no_place,
    notice,
    request,
    retry_later,
    started,
    use_all_nodes,
)
from counterpoint.cluster.manager.state import (
    BundleRecord,
    JobState,
    Ledger,
    Phase,
    Place,
    RoleRecord,
    WorkerRecord,
    first_state,
)
from counterpoint.cluster.manager.stopping import STOPPED_EARLY, stop, stop_requested, stop_when_idle
from counterpoint.cluster.spec import JobSpec, RoleSpec, sub_master_name
from counterpoint.cluster.worker import Member

TAKEOVER_SECONDS = 10.0
"""After a change of masters nothing is overdue for so long: answers that were given meanwhile come first."""


class PrimeManager:
    """The state machine of one job."""

    def __init__(self, spec: JobSpec, snapshot: Mapping[str, Any] | None = None) -> None:
        """Takes the job, and the `snapshot` of an earlier manager of it, if there is one.

        Raises `TypeError`, `KeyError` or `ValueError` if the snapshot is none.
        """
        self._ledger = Ledger(spec, first_state(spec) if snapshot is None else JobState.from_dict(snapshot))

    @property
    def spec(self) -> JobSpec:
        """The job."""
        return self._ledger.spec

    @property
    def state(self) -> JobState:
        """All that the manager knows, to be read."""
        return self._ledger.state

    @property
    def stage(self) -> ManagerStage:
        """The stage of the job as a whole."""
        return self.state.stage

    @property
    def outcome(self) -> Outcome | None:
        """How the job ended; None while it has not."""
        return self.state.outcome

    @property
    def deadline(self) -> float | None:
        """When `Tick` is due, on the events' clock; None if nothing is."""
        return self._ledger.deadline

    def snapshot(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
        return self.state.to_dict()

    def role_of(self, worker: WorkerRecord) -> RoleSpec:
        """Returns the role of a worker."""
        return self._ledger.spec_of(worker)

    def outstanding(self) -> list[Instruction]:
        """Returns every instruction that is not answered."""
        return outstanding(self.state)

    def take_changes(self) -> list[Member]:
        """Returns the members that have changed since the last call, for `publish`; all of them at first."""
        changed = [member(self.state, name) for name in self._ledger.changes]
        self._ledger.changes.clear()
        return changed

    def is_stale(self, event: Event) -> bool:
        """Whether the event is about a worker that has ended, or has another incarnation: it changes nothing."""
        worker, incarnation = getattr(event, "worker", None), getattr(event, "incarnation", None)
        return worker is not None and incarnation is not None and self._ledger.current(worker, incarnation) is None

    # --- the stages of a job by name; each decides what `handle` decides for an event, which a journal keeps ---

    def prepare(self) -> list[Instruction]:
        """Asks for every bundle's place; creation, and READY, follow from the answers. Once: a repetition returns nothing."""
        return [] if self.state.begun else begin(self._ledger)

    def start(self) -> list[Instruction]:
        """Returns each `Start` that is not answered; they are made by the event with which the job became READY.

        Raises `ValueError` before that, with the roles that are not ready.
        """
        if self.stage is ManagerStage.INIT:
            raise ValueError(
                f"the job is not READY: {', '.join(sorted(self._ledger.not_passed))} not ready and checked"
            )
        return [each for each in self.outstanding() if isinstance(each, Start)]

    def monitor(self, at: float) -> list[Instruction]:
        """Decides what is due: who is late, and what is tried again."""
        instructions: list[Instruction] = []
        while (record := self._ledger.take_due(at)) is not None:
            if isinstance(record, BundleRecord):
                instructions += allocate(self._ledger, record)
            elif isinstance(record, RoleRecord):
                instructions += self._check_overdue(record, at)
            else:
                instructions += overdue(self._ledger, record, at)
        return instructions

    def stop(self, at: float, reason: str = "stopped", code: int = STOPPED_EARLY) -> list[Instruction]:
        """Stops the workers in order; a second time, more than a second later, kills them."""
        return stop_requested(self._ledger, StopRequested(reason, code, "", at))

    def handle(self, event: Event) -> list[Instruction]:
        """Returns the instructions for one event, in order."""
        ledger = self._ledger
        if isinstance(event, MasterChanged):
            return self._master_changed(event)
        if self.outcome is not None:
            return self._late(event)
        match event:
            case Begin():
                return self.prepare()
            case Allocated():
                return allocated(ledger, event)
            case AllocationFailed():
                return self._allocation_failed(event)
            case Created():
                return created(ledger, event)
            case CreateFailed():
                return create_failed(ledger, event)
            case WorkerReady():
                return became_ready(ledger, event)
            case WorkerStarted():
                return started(ledger, event)
            case WorkFinished():
                return finished(ledger, event)
            case EndAnnounced():
                return end_announced(ledger, event)
            case ExtensionRequested():
                return extension_requested(ledger, event)
            case WorkerExited():
                return exited(ledger, event)
            case WorkerSuspected() | WorkerHeard():
                return suspect(ledger, event)
            case WorkerSilent():
                return silent(ledger, event)
            case ChildrenChecked():
                return children_checked(ledger, event)
            case FailoverDone():
                return failover_done(ledger, event)
            case ReplaceRequested():
                return replace_requested(ledger, event)
            case ScaleRequested():
                return scale(ledger, event)
            case NodeLost():
                return node_lost(ledger, event)
            case StopRequested():
                return stop_requested(ledger, event)
            case GuestsChanged():
                self.state.guests = list(event.guests)
                return stop_when_idle(ledger, event.at)
            case Tick():
                return self.monitor(event.at)

    def _late(self, event: Event) -> list[Instruction]:
        """After the end, only a place that was found too late is given back."""
        return allocated(self._ledger, event) if isinstance(event, Allocated) else []

    def _master_changed(self, event: MasterChanged) -> list[Instruction]:
        if event.epoch <= self.state.epoch:
            return []
        self.state.epoch = event.epoch
        ledger, earliest = self._ledger, event.at + TAKEOVER_SECONDS
        answered = [worker for worker in self.state.workers.values() if worker.phase is not Phase.RESTARTING]
        timed: list[WorkerRecord | RoleRecord] = [*answered, *self.state.roles.values()]
        for record in timed:
            if record.deadline is not None:
                ledger.set_deadline(record, max(record.deadline, earliest))
        ledger.changes.update(dict.fromkeys(self.state.workers))
        return self.outstanding()

    def _allocation_failed(self, event: AllocationFailed) -> list[Instruction]:
        bundle = self.state.bundles.get(event.bundle)
        if bundle is None or bundle.attempt != event.attempt or bundle.place is not Place.ALLOCATING:
            return []
        if event.final and not use_all_nodes(self._ledger):
            smaller = make_room(self._ledger, bundle, event.at)
            return stop(self._ledger, no_place(bundle, event.reason), event.at) if smaller is None else smaller
        retry_later(self._ledger, bundle, event.at)
        return []

    def _check_overdue(self, role: RoleRecord, at: float) -> list[Instruction]:
        sub_master = self._ledger.sub_master(role.name)
        assert sub_master is not None
        seconds = self._ledger.roles[role.name].ready_timeout_seconds
        return kill_stuck(self._ledger, sub_master, f"did not check its workers within {seconds:g} s", at)


def member(state: JobState, worker: str) -> Member:
    """Returns a worker as the others see it."""
    record = state.workers[worker]
    return Member(worker, record.incarnation, record.stage, record.address, record.node, record.server_key)


# --- what is asked and not answered: a new master repeats exactly this ---


def outstanding(state: JobState) -> list[Instruction]:
    """Returns every instruction that may not have been carried out, in an order in which they may be.

    It may name more than what was lost with the former master: an instruction that was carried out, whose answer is on its way.
    So whoever carries them out is idempotent.
    """
    instructions: list[Instruction] = []
    for bundle in state.bundles.values():
        if bundle.place is Place.RELEASED or (bundle.place is Place.ALLOCATING and bundle.attempt > 1):
            instructions.append(Release(bundle.name))
        if bundle.place is Place.ALLOCATING:
            instructions.append(request(state.set_aside, bundle))
    for worker in state.workers.values():
        instructions += _of_worker(worker)
    for role in state.roles.values():
        if role.checking:
            sub_master = state.workers[sub_master_name(role.name)]
            instructions.append(CheckChildren(sub_master.name, sub_master.incarnation, role.check))
    return instructions


def _of_worker(worker: WorkerRecord) -> Iterator[Instruction]:
    match worker.phase:
        case Phase.CREATING:
            yield creation(worker)
        case Phase.STARTING:
            yield Start(worker.name, worker.incarnation)
        case Phase.STUCK:
            yield Kill(worker.name, worker.incarnation)
        case Phase.STOPPING | Phase.RECYCLING if worker.killed:
            yield Kill(worker.name, worker.incarnation)
        case Phase.STOPPING | Phase.RECYCLING:
            yield Stop(worker.name, worker.incarnation)
    if worker.noticed and worker.phase in (Phase.READY, Phase.STARTING, Phase.RUNNING, Phase.FINISHED):
        yield notice(worker)
