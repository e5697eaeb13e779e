"""The PrimeManager: every decision about a job, without clock or I/O. Events in, instructions out.

Its state is the fold of the events it was given, and whoever keeps its `snapshot` can have it again. It neither waits nor
asks: when something is due it says so by `deadline`, and is given a `Tick`. An event costs the same in a job of ten workers and
of ten thousand; what concerns many workers costs as much as those are.

Next in the reading order of `docs/architecture.md`: `transport/process/keeper/decisions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from counterpoint.cluster.manager import ending, events, starting
from counterpoint.cluster.manager.events import Event, Instruction, ManagerStage, Outcome
from counterpoint.cluster.manager.state import (
    ALIVE,
    UNREADY,
    WELL,
    JobLedger,
    JobState,
    Phase,
    PlacementState,
    RoleRecord,
    WorkerRecord,
    asked,
    first_state,
)
from counterpoint.cluster.member import Member
from counterpoint.cluster.spec import JobSpec, RoleSpec, sub_master_name

TAKEOVER_SECONDS = 10.0
"""Seconds after a change of masters for which nothing is overdue: answers that were given meanwhile come first."""

Handler = Callable[..., list[Instruction]]

OF_A_WORKER: dict[type[Event], tuple[Handler, frozenset[Phase]]] = {
    events.Created: (starting.created, ALIVE),
    events.CreateFailed: (ending.create_failed, ALIVE),
    events.WorkerReady: (starting.became_ready, frozenset({Phase.CREATING, Phase.INITIALIZING})),
    events.WorkerStarted: (starting.started, frozenset({Phase.STARTING})),
    events.WorkFinished: (starting.finished, frozenset({Phase.STARTING, Phase.RUNNING})),
    events.ChildrenChecked: (starting.children_checked, ALIVE),
    events.FailoverDone: (starting.failover_done, ALIVE),
    events.EndAnnounced: (starting.end_announced, WELL),
    events.ExtensionRequested: (ending.extension_requested, ALIVE),
    events.ReplaceRequested: (ending.replace_requested, WELL | {Phase.CREATING}),
    events.WorkerSuspected: (ending.suspect, WELL),
    events.WorkerHeard: (ending.suspect, WELL),
    events.WorkerSilent: (ending.silent, WELL),
    events.WorkerExited: (ending.exited, ALIVE),
}
"""What decides about an event of a worker, and the phases in which that counts: in another, or of another incarnation, it is
stale or was sent twice, and changes nothing. These decide by the ledger, the worker and the event."""

OF_THE_JOB: dict[type[Event], Handler] = {
    events.BeginJob: starting.begin,
    events.Allocated: starting.allocated,
    events.AllocationFailed: ending.allocation_failed,
    events.NodeLost: ending.node_lost,
    events.ScaleRequested: ending.scale,
    events.JobStopRequested: ending.stop_requested,
    events.GuestsChanged: ending.guests_changed,
    events.Tick: ending.due,
}
"""What decides about every other event but `MasterChanged`, by the ledger and the event."""


class PrimeManager:
    """The state machine of one job."""

    def __init__(self, spec: JobSpec, snapshot: Mapping[str, Any] | None = None) -> None:
        """Takes the job, and the `snapshot` of an earlier manager of it, if there is one.

        Raises `ValueError` if the snapshot is none of this version.
        """
        self._ledger = JobLedger(spec, first_state(spec) if snapshot is None else JobState.from_dict(snapshot))

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
        """The time at which `Tick` is due, on the events' clock; None if it is not."""
        return self._ledger.deadline

    def snapshot(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
        return self.state.to_dict()

    def role_of(self, worker: WorkerRecord) -> RoleSpec:
        """Returns the role of a worker."""
        return self._ledger.spec_of(worker)

    def take_changes(self) -> list[Member]:
        """Returns the members that have changed since the last call, for `publish`; all of them at first."""
        changed = [member(self.state, name) for name in self._ledger.changes]
        self._ledger.changes.clear()
        return changed

    def is_stale(self, event: Event) -> bool:
        """Whether the event is about a worker that has ended, or has another incarnation: it changes nothing."""
        worker, incarnation = getattr(event, "worker", None), getattr(event, "incarnation", None)
        return worker is not None and incarnation is not None and self._ledger.current(worker, incarnation) is None

    # --- the stages of a job by name; each decides what `handle` decides for an event ---

    def prepare(self) -> list[Instruction]:
        """Asks for every bundle's place; creation, and READY, follow from the answers. Once: a repetition returns nothing."""
        return self.handle(events.BeginJob(0.0))

    def start(self) -> list[Instruction]:
        """Returns each `Start` that is not answered; they are made by the event with which the job became READY.

        Raises `ValueError` before that, with the roles that are not ready.
        """
        if self.stage is ManagerStage.INIT:
            left = sorted(role for role in self._ledger.roles if not self._ledger.is_passed(role))
            raise ValueError(f"the job is not READY: {', '.join(left)} not ready and checked")
        return [each for each in self.outstanding() if isinstance(each, events.Start)]

    def monitor(self, at: float) -> list[Instruction]:
        """Decides what is due: who is late, and what is tried again."""
        return self.handle(events.Tick(at))

    def stop(self, at: float, reason: str = "stopped", code: int = ending.STOPPED_EARLY) -> list[Instruction]:
        """Stops the workers in order; a second time, more than a second later, kills them."""
        return self.handle(events.JobStopRequested(reason, code, "", at))

    def handle(self, event: Event) -> list[Instruction]:
        """Returns the instructions for one event, in order."""
        if isinstance(event, events.MasterChanged):
            return self._master_changed(event)
        if self.outcome is not None and not isinstance(event, events.Allocated):
            return []  # only a place that was found too late is still to be given back
        if (decides := OF_THE_JOB.get(type(event))) is not None:
            return decides(self._ledger, event)
        of_worker: Any = event
        decides, phases = OF_A_WORKER[type(event)]
        worker = self._ledger.current(of_worker.worker, of_worker.incarnation)
        return decides(self._ledger, worker, event) if worker is not None and worker.phase in phases else []

    def outstanding(self) -> list[Instruction]:
        """Returns every instruction that may not have been carried out, in an order in which they may be.

        A new master repeats these. They may be more than what was lost with the former master: also what was carried out, and
        whose answer is on its way. So whoever carries them out is idempotent.
        """
        state, instructions = self.state, list[Instruction]()
        for bundle in state.bundles.values():
            if bundle.place is PlacementState.RELEASED or (
                bundle.place is PlacementState.ALLOCATING and bundle.attempt > 1
            ):
                instructions.append(events.Release(bundle.name))
            if bundle.place is PlacementState.ALLOCATING:
                instructions.append(starting.request(state.set_aside, bundle))
        for worker in state.workers.values():
            instructions += asked(worker)
            if worker.noticed and worker.phase in WELL - UNREADY:
                instructions.append(starting.notice(worker))
        for role in state.roles.values():
            if role.checking:
                sub_master = state.workers[sub_master_name(role.name)]
                instructions.append(events.CheckChildren(sub_master.name, sub_master.incarnation, role.check))
        return instructions

    def _master_changed(self, event: events.MasterChanged) -> list[Instruction]:
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


def member(state: JobState, worker: str) -> Member:
    """Returns a worker as the others see it."""
    record = state.workers[worker]
    return Member(worker, record.incarnation, record.stage, record.address, record.node, record.server_key)
