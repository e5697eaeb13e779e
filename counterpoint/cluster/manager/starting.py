"""Leads workers from a place to work: bundles get places, and workers are created there, checked by their SubMaster, and started.

Workers are created in the order of `after`, and started with the whole job. `advance` is called whenever a role may have become
ready; it does all that follows: it creates the workers of roles that waited for it, tells of those that were created again, has
the SubMaster check them, and starts those that may start. A role with `start = "worker"` works before the job is ready, so that
others can become ready with its help. A bundle gets another place when its node is lost; a node that is lost several times
within a window is set aside. What becomes of the workers of a lost node is decided in `ending`.
"""

from __future__ import annotations

import math

from counterpoint.cluster.manager import events
from counterpoint.cluster.manager.state import (
    NOT_RUNNING,
    UNREADY,
    WELL,
    BundleRecord,
    JobLedger,
    Phase,
    PlacementState,
    RoleRecord,
    WorkerRecord,
)
from counterpoint.cluster.spec import JobSpec, Resources, RestartScope, StartGate, role_of, sub_master_name

LOSSES = 3
"""A node that is lost so often within the window is set aside."""

LOSS_WINDOW_SECONDS = 600.0

FIRST_RETRY_SECONDS = 1.0
"""Seconds between an attempt to place a bundle and the next; doubled for each further one."""

LONGEST_RETRY_SECONDS = 30.0

# --- places ---


def needs_of(spec: JobSpec, worker: str) -> Resources:
    """Returns what a worker needs; a SubMaster needs nothing."""
    role = role_of(worker)
    return Resources() if worker == sub_master_name(role) else spec.role(role).resources


def allocate(ledger: JobLedger, bundle: BundleRecord) -> list[events.Instruction]:
    """Asks for a place, once more if it had one: that is given back first."""
    again = bundle.place in (PlacementState.ALLOCATED, PlacementState.RELEASED)
    ledger.set_place(bundle, PlacementState.ALLOCATING)
    bundle.attempt += 1
    return [*([events.Release(bundle.name)] if again else []), request(ledger.state.set_aside, bundle)]


def request(set_aside: list[str], bundle: BundleRecord) -> events.Allocate:
    """Returns the request for the bundle's place."""
    return events.Allocate(bundle.name, bundle.attempt, tuple(bundle.workers), tuple(set_aside))


def release(ledger: JobLedger, bundle: BundleRecord) -> list[events.Instruction]:
    """Gives the place back, or the wish for one."""
    if bundle.place in (PlacementState.NONE, PlacementState.RELEASED):
        return []
    ledger.set_place(bundle, PlacementState.RELEASED)
    bundle.failures = 0
    return [events.Release(bundle.name)]


def use_all_nodes(ledger: JobLedger) -> bool:
    """Uses nodes that were set aside again, before something is given up for want of them; False if there are none."""
    had = bool(ledger.state.set_aside)
    ledger.state.set_aside.clear()
    ledger.state.node_losses.clear()
    return had


def retry_later(ledger: JobLedger, bundle: BundleRecord, at: float) -> None:
    """Asks for the place again after a pause."""
    pause = min(FIRST_RETRY_SECONDS * 2 ** min(bundle.failures, 10), LONGEST_RETRY_SECONDS)
    ledger.set_place(bundle, PlacementState.RETRYING, at + pause)
    bundle.failures += 1


def no_place(bundle: BundleRecord, reason: str) -> events.Outcome:
    """Returns the outcome of a job of which a bundle can never be placed."""
    workers = ", ".join(bundle.workers[:3]) + (", ..." if len(bundle.workers) > 3 else "")
    return events.Outcome(1, f"there is no place for {workers}: {reason}"[: events.LONGEST_REASON])


def lose_node(ledger: JobLedger, node: str, at: float) -> list[BundleRecord]:
    """Counts the loss; returns the bundles that were there, and have no node now. None if it was empty, or lost before."""
    names = sorted(ledger.bundles_on.get(node, ()))
    if not names:
        return []
    state = ledger.state
    losses = [earlier for earlier in state.node_losses.get(node, []) if earlier > at - LOSS_WINDOW_SECONDS] + [at]
    state.node_losses[node] = losses[-LOSSES:]
    if len(losses) >= LOSSES and node not in state.set_aside:
        state.set_aside.append(node)
    bundles = [state.bundles[name] for name in names]
    for bundle in bundles:
        ledger.set_node(bundle, "")
    return bundles


# --- creation ---


def begin(ledger: JobLedger, _: events.BeginJob) -> list[events.Instruction]:
    """Asks for every bundle's place at once, so that a job that does not fit is known before anything runs; once."""
    if ledger.state.begun:
        return []
    ledger.state.begun = True
    return [instruction for bundle in ledger.state.bundles.values() for instruction in allocate(ledger, bundle)]


def allocated(ledger: JobLedger, event: events.Allocated) -> list[events.Instruction]:
    """Creates the workers that waited for the place."""
    bundle = ledger.state.bundles.get(event.bundle)
    if bundle is None or bundle.attempt != event.attempt or bundle.place is PlacementState.ALLOCATED:
        return []
    if (
        bundle.place is PlacementState.RELEASED
    ):  # it is not needed any more, and was given back too early to be given back
        return [events.Release(bundle.name)]
    ledger.set_place(bundle, PlacementState.ALLOCATED, node=event.node)
    bundle.failures = 0
    workers = [ledger.state.workers[name] for name in bundle.workers if name in ledger.state.workers]
    return [create for worker in workers for create in create_if_possible(ledger, worker, event.at)]


def create_if_possible(ledger: JobLedger, worker: WorkerRecord, at: float) -> list[events.Instruction]:
    """Creates a waiting worker if its bundle has a place, and it need not wait for other roles."""
    if worker.phase is not Phase.WAITING or ledger.state.bundles[worker.bundle].place is not PlacementState.ALLOCATED:
        return []
    if not worker.unblocked and any(ledger.is_awaited(role) for role in ledger.spec_of(worker).after):
        return []
    worker.incarnation += 1
    worker.unblocked = True
    worker.suspected = False
    return ledger.move(worker, Phase.CREATING, at)


def created(ledger: JobLedger, worker: WorkerRecord, event: events.Created) -> list[events.Instruction]:
    """Notes where the process is; a command that does not notify is ready."""
    if worker.pid:
        return []
    worker.node, worker.pid = event.node, event.pid
    ledger.set_node(ledger.state.bundles[worker.bundle], event.node)
    ledger.changes[worker.name] = None
    if worker.phase is not Phase.CREATING:
        return []
    if ledger.spec_of(worker).ready_timeout_seconds is None:
        return _ready(ledger, worker, event.at)
    return ledger.move(worker, Phase.INITIALIZING, event.at)


def became_ready(ledger: JobLedger, worker: WorkerRecord, event: events.WorkerReady) -> list[events.Instruction]:
    """Notes a worker's address, and what follows from its being ready."""
    if worker.ending or ledger.stops:
        return []  # too late
    worker.address, worker.server_key = event.address, event.server_key
    return _ready(ledger, worker, event.at)


def _ready(ledger: JobLedger, worker: WorkerRecord, at: float) -> list[events.Instruction]:
    worker.ready_since = at
    worker.was_ready = True
    worker.launched = ledger.spec_of(worker).command is not None
    ledger.move(worker, Phase.RUNNING if worker.launched else Phase.READY, at)
    return advance(ledger, worker.role, at)


# --- a role that is ready ---


def advance(ledger: JobLedger, role: str, at: float) -> list[events.Instruction]:
    """Does what may follow from a worker of the role having become ready, or having ended."""
    if ledger.stops:
        return []
    release_held(ledger, role, at)
    instructions: list[events.Instruction] = []
    instructions += _create_dependents(ledger, role, at)
    if not ledger.number(UNREADY, role):
        instructions += _tell_of_changes(ledger, ledger.state.roles[role])
        instructions += _check(ledger, ledger.state.roles[role], at)
    return instructions + start_ready(ledger, role, at)


def _create_dependents(ledger: JobLedger, role: str, at: float) -> list[events.Instruction]:
    """Creates the workers that waited for the role."""
    if ledger.is_awaited(role):
        return []
    waiting = [worker for name in ledger.dependents[role] for worker in ledger.at(name, [Phase.WAITING])]
    return [create for worker in waiting for create in create_if_possible(ledger, worker, at)]


def release_held(ledger: JobLedger, role: str, at: float) -> None:
    """Has those that were recycled created again once all of them have ended."""
    state = ledger.state
    roles = list(ledger.roles) if state.restarting_all else [role]
    if ledger.stops or any(ledger.number([Phase.RECYCLING], name) for name in roles):
        return
    due = max(at, *(state.roles[name].not_before for name in roles))
    state.restarting_all = False
    for name in roles:
        state.roles[name].not_before = 0.0
        for worker in ledger.at(name, [Phase.HELD]):
            ledger.set_phase(worker, Phase.RESTARTING, due)


def _tell_of_changes(ledger: JobLedger, role: RoleRecord) -> list[events.Instruction]:
    """Tells the SubMaster of those that were created again or left; after a role's restart, those that start after it, too."""
    changed, role.changed = role.changed, []
    if not changed or ledger.state.stage is events.ManagerStage.INIT:
        return []
    sub_master = ledger.sub_master(role.name)
    concerned = [] if sub_master is None else [sub_master]
    if ledger.roles[role.name].restart is RestartScope.ROLE:
        for dependent in ledger.dependents[role.name]:
            if ledger.roles[dependent].command is None:
                concerned += ledger.at(dependent)
    return [notice for worker in concerned for notice in _notify(worker, changed)]


def _notify(worker: WorkerRecord, failed: list[str]) -> list[events.Instruction]:
    """One notice at a time: what happens before it is answered is told with the next one."""
    if worker.phase not in WELL or worker.phase is Phase.INITIALIZING or worker.ending:
        return []
    worker.to_notice += failed
    return [] if worker.noticed else _next_notice(worker)


def _next_notice(worker: WorkerRecord) -> list[events.Instruction]:
    worker.noticed, worker.to_notice = list(dict.fromkeys(worker.to_notice)), []
    if not worker.noticed:
        return []
    worker.notice += 1
    return [notice(worker)]


def notice(worker: WorkerRecord) -> events.Failover:
    """Returns the notice that the worker has not answered."""
    return events.Failover(worker.name, worker.incarnation, worker.notice, tuple(worker.noticed))


def failover_done(ledger: JobLedger, worker: WorkerRecord, event: events.FailoverDone) -> list[events.Instruction]:
    """Sends the next notice, if there is one."""
    return _next_notice(worker) if worker.noticed and event.notice == worker.notice else []


def _check(ledger: JobLedger, role: RoleRecord, at: float) -> list[events.Instruction]:
    sub_master = ledger.sub_master(role.name)
    if sub_master is None or role.checked or role.checking or sub_master.phase not in WELL or sub_master.ending:
        return []
    role.check += 1
    role.checking = True
    ledger.set_deadline(role, at + (ledger.roles[role.name].ready_timeout_seconds or math.inf))
    return [events.CheckChildren(sub_master.name, sub_master.incarnation, role.check)]


def children_checked(
    ledger: JobLedger, worker: WorkerRecord, event: events.ChildrenChecked
) -> list[events.Instruction]:
    """Starts the workers that waited for the check; void if one of them has died meanwhile."""
    role = ledger.state.roles[worker.role]
    if worker.rank >= 0 or not role.checking or event.check != role.check:
        return []
    role.checking, role.checked = False, True
    ledger.set_deadline(role, None)
    if ledger.stops:
        return []
    return _create_dependents(ledger, role.name, event.at) + start_ready(ledger, role.name, event.at)


# --- starting ---


def start_ready(ledger: JobLedger, role: str, at: float) -> list[events.Instruction]:
    """Starts the whole job once it is ready; later, and in a role that does not wait for the job, those that may start."""
    state = ledger.state
    if ledger.stops:
        return []
    instructions: list[events.Instruction] = []
    if state.stage is not events.ManagerStage.INIT or ledger.roles[role].start is StartGate.WORKER:
        instructions += _start_role(ledger, role, at)
    if state.stage is events.ManagerStage.INIT and all(ledger.is_passed(name) for name in ledger.roles):
        ledger.set_stage(events.ManagerStage.READY)
        instructions += [start for name in ledger.roles for start in _start_role(ledger, name, at)]
    _note_running(ledger)
    return instructions


def _start_role(ledger: JobLedger, name: str, at: float) -> list[events.Instruction]:
    role = ledger.roles[name]
    alone = role.start is StartGate.WORKER or (role.restart is RestartScope.WORKER and role.sub_master is None)
    if not alone and not ledger.is_passed(name):
        return []
    instructions: list[events.Instruction] = []
    for worker in ledger.at(name, [Phase.READY]):
        worker.launched = True
        instructions += ledger.move(worker, Phase.STARTING, at)
    return instructions


def started(ledger: JobLedger, worker: WorkerRecord, event: events.WorkerStarted) -> list[events.Instruction]:
    """Notes that a worker works."""
    ledger.move(worker, Phase.RUNNING, event.at)
    _note_running(ledger)
    return []


def finished(ledger: JobLedger, worker: WorkerRecord, event: events.WorkFinished) -> list[events.Instruction]:
    """Notes that a worker's `start` returned by itself. A task's process ends next: it has as long as after a request."""
    if worker.task:
        worker.settled = True
        end_announced(ledger, worker, event)
    ledger.move(worker, Phase.FINISHED, event.at)
    _note_running(ledger)
    return []


def end_announced(
    ledger: JobLedger, worker: WorkerRecord, event: events.EndAnnounced | events.WorkFinished
) -> list[events.Instruction]:
    """Gives a worker that is about to end as long as after a request."""
    if not worker.ending:
        worker.ending = True
        ledger.set_deadline(worker, event.at + ledger.spec_of(worker).stop_timeout_seconds)
    return []


def _note_running(ledger: JobLedger) -> None:
    if ledger.state.stage is events.ManagerStage.READY and not ledger.number(NOT_RUNNING):
        ledger.set_stage(events.ManagerStage.RUNNING)
