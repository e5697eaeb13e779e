"""Leads workers from work to their end: who is created again after a death, who leaves, and how the whole job ends.

By its role's restart scope the worker alone is created again, or all of its role, or the whole job: those are asked to end
first, *recycled*. The scope counts for a worker that had begun to work; one that died before that has left no mark on others, and
is created again alone. The deaths of a worker in a row are bounded; those with a lost node or a keeper, and those of a full disk,
do not count. A command that was never ready and gives the same reason for its second death has no third one, unless an obstacle
ended it that may pass.

When the job ends, all tasks stop first, at once, since they do not need one another; then role by role in reverse, as
`JobSpec.stop_order` says, the workers of a role at once and its SubMaster after them, since a service may need those before it to
end well.
"""

from __future__ import annotations

import math
import re
import signal

from counterpoint.cluster.manager import events, starting
from counterpoint.cluster.manager.state import (
    ALIVE,
    DEAD,
    ENDED,
    WELL,
    BundleRecord,
    JobLedger,
    Phase,
    PlacementState,
    RoleRecord,
    WorkerRecord,
    add_worker,
)
from counterpoint.cluster.spec import RestartScope, worker_name
from counterpoint.transport.process.exit_codes import ASKED_TO_END, describe_exit
from counterpoint.transport.process.permanent_errors import DISK_FULL, NOTHING_LEARNED, PASSING
from counterpoint.transport.process.stop_requests import REPETITION_SECONDS

FIRST_BACKOFF_SECONDS = 1.0
"""Seconds between a death and the first restart; doubled for each further restart in a row."""

LONGEST_BACKOFF_SECONDS = 30.0
"""The limit of the doubling."""

HEALTHY_SECONDS = 180.0
"""Seconds for which a worker is ready before its restarts are counted anew."""

FINAL_CODES = frozenset({2, 3, NOTHING_LEARNED})
"""Exit codes after which a restart would end alike: a bad configuration, an eviction, a run that learns nothing."""

NOT_READY = "was not ready within"
"""How the words about a worker begin that missed the deadline of its start."""

_NUMBERS = re.compile(r"[0-9][0-9.]*")

STOPPED_EARLY = 128 + signal.SIGTERM
"""Exit code of a job whose tasks were stopped one by one before their work was complete."""

DONE = events.Outcome(0, "done")


# --- the end of a process ---


def exited(ledger: JobLedger, worker: WorkerRecord, event: events.WorkerExited) -> list[events.Instruction]:
    """Decides what the end of a process means."""
    code, at, command = event.code, event.at, ledger.spec_of(worker).command is not None
    in_order = code == 0 or code in ASKED_TO_END or event.lost
    if code == 0 and worker.task and command:
        worker.settled = True  # of a class, only `WorkFinished` says so: its process may end with 0 for other reasons
    if worker.rank < 0 and ledger.stops and code > 128 and not worker.killed:
        # Killed by another hand. Its workers are stopped without it, and it has no work of its own.
        worker.last_death = words_of(event)
        return ended(ledger, worker, Phase.STOPPED, at)
    if worker.phase is Phase.STOPPING:
        if not in_order and not worker.killed:  # why a killed one was killed is known already
            worker.last_death = f"{words_of(event)} while it was being stopped"
            failed_to_stop(ledger, worker, code)
        return ended(ledger, worker, Phase.STOPPED if in_order and not worker.killed else Phase.FAILED, at)
    recycled = worker.phase is Phase.RECYCLING
    told = code in ASKED_TO_END and worker.task and command and not recycled  # by another hand
    last = worker.rank < 0 and not recycled and ledger.number(ALIVE | DEAD, worker.role) == 1
    if worker.settled or told or last or (in_order and ledger.stops):
        return ended(ledger, worker, Phase.STOPPED, at)  # its work is done; or its peers had gone, and it ended, too
    words = words_of(event) + (", although the job still needs it" if code == 0 else "")
    if worker.stuck:  # of a node that is gone, nobody can say that it was killed there
        words = f"{worker.stuck}, and {words}" if event.lost or event.reason else f"{worker.stuck} and was killed"
    hopeless = bool(event.reason) and code != PASSING and _ended_alike(ledger, worker, words)
    return died(ledger, worker, code, words, at, with_node=event.lost, hopeless=hopeless)


def _ended_alike(ledger: JobLedger, worker: WorkerRecord, words: str) -> bool:
    """Whether a command that was never ready ended for this reason before, numbers aside: it would for ever."""
    role = ledger.spec_of(worker)
    same = _NUMBERS.sub("0", words) == _NUMBERS.sub("0", worker.last_death)
    return same and role.command is not None and role.essential and not worker.was_ready


def words_of(event: events.WorkerExited) -> str:
    """Describes the end of a process, for a person."""
    if event.lost:
        return f"was lost: {event.reason}"
    return describe_exit(event.code) + (f": {event.reason}" if event.reason else "")


def create_failed(ledger: JobLedger, worker: WorkerRecord, event: events.CreateFailed) -> list[events.Instruction]:
    """Handles it as a death, since the cause (a full disk, no memory) may be gone at the next attempt."""
    if worker.phase is Phase.STOPPING:
        return ended(ledger, worker, Phase.STOPPED, event.at)
    worker.ready_since = None
    return died(ledger, worker, 1, f"could not be started: {event.reason}", event.at)


def node_lost(ledger: JobLedger, event: events.NodeLost) -> list[events.Instruction]:
    """Places all that was on the node elsewhere."""
    bundles = starting.lose_node(ledger, event.node, event.at)
    instructions: list[events.Instruction] = []
    for bundle in bundles:
        if ledger.left_in_bundle[bundle.name] and not ledger.stops:
            instructions += starting.allocate(ledger, bundle)
    for bundle in bundles:
        for name in bundle.workers:
            worker = ledger.state.workers.get(name)
            if worker is not None and worker.phase in ALIVE:
                instructions += _lost(ledger, worker, event)
    return instructions


def _lost(ledger: JobLedger, worker: WorkerRecord, event: events.NodeLost) -> list[events.Instruction]:
    if worker.settled or worker.phase is Phase.STOPPING or ledger.stops:
        return ended(ledger, worker, Phase.FAILED if worker.killed else Phase.STOPPED, event.at)
    words = f"was lost with node {event.node}: {event.reason}"
    return died(ledger, worker, 1, words, event.at, with_node=True)


def died(
    ledger: JobLedger,
    worker: WorkerRecord,
    code: int,
    words: str,
    at: float,
    *,
    with_node: bool = False,
    hopeless: bool = False,
) -> list[events.Instruction]:
    """Creates a worker that is still needed again, by its role's scope, or gives it up, as one that is `hopeless`.

    One that was recycled has not failed.
    """
    surplus = worker.rank >= ledger.state.roles[worker.role].wanted  # its role has fewer workers by now
    if surplus or worker.phase is Phase.RECYCLING:
        _forget_process(worker)
        if surplus:
            return remove(ledger, worker, at)
        ledger.set_phase(worker, Phase.HELD)
        starting.release_held(ledger, worker.role, at)
        return []
    worker.last_death = words[: events.LONGEST_REASON]
    if worker.ready_since is not None and at - worker.ready_since >= HEALTHY_SECONDS:
        worker.deaths = 0
    counts = not with_node and code != DISK_FULL
    over = counts and (hopeless or code in FINAL_CODES or worker.deaths >= ledger.spec_of(worker).max_restarts)
    if ledger.stops or over:
        return failed_for_good(ledger, worker, code, at)
    pause = min(FIRST_BACKOFF_SECONDS * 2 ** min(worker.deaths, 10), LONGEST_BACKOFF_SECONDS)
    if not counts:
        pause = 0.0 if with_node else LONGEST_BACKOFF_SECONDS
    worker.deaths += counts
    worker.restarts += 1
    if worker.rank >= 0:
        ledger.state.roles[worker.role].changed.append(worker.name)
    scope = ledger.scope_of(worker) if worker.launched else RestartScope.WORKER
    _forget_process(worker)
    if scope is RestartScope.WORKER:
        ledger.set_phase(worker, Phase.RESTARTING, at + pause)
        return []
    ledger.set_phase(worker, Phase.HELD)
    if scope is RestartScope.JOB:
        ledger.state.restarting_all = True
        ledger.set_stage(events.ManagerStage.INIT)
    roles = ledger.roles if scope is RestartScope.JOB else [worker.role]
    instructions = [request for role in roles for request in _recycle_role(ledger, role, at, at + pause)]
    starting.release_held(ledger, worker.role, at)
    return instructions


def _forget_process(worker: WorkerRecord) -> None:
    worker.address = worker.server_key = worker.node = worker.stuck = ""
    worker.pid = 0
    worker.ready_since = None
    worker.launched = worker.killed = False
    worker.noticed.clear()
    worker.to_notice.clear()


def _recycle_role(ledger: JobLedger, role: str, at: float, not_before: float) -> list[events.Instruction]:
    """Asks all of a role to end and be created again; of the whole job, the SubMasters as well."""
    record = ledger.state.roles[role]
    record.not_before = max(record.not_before, not_before)
    instructions: list[events.Instruction] = []
    for worker in ledger.at(role):
        if worker.rank < 0 and not ledger.state.restarting_all:
            continue
        if ledger.state.restarting_all:
            worker.unblocked = False
        if worker.phase is Phase.RESTARTING:
            record.not_before = max(record.not_before, worker.deadline or at)
            ledger.set_phase(worker, Phase.HELD)
        elif worker.phase is Phase.STUCK:
            worker.launched = False  # its death will be one of these, not a further one
        elif (worker.phase in WELL and not worker.settled) or worker.phase is Phase.CREATING:
            if worker.rank >= 0:
                record.changed.append(worker.name)
            instructions += ledger.move(worker, Phase.RECYCLING, at)
    return instructions


def ended(ledger: JobLedger, worker: WorkerRecord, phase: Phase, at: float) -> list[events.Instruction]:
    """Notes that a worker has ended for good, and does what follows."""
    instructions = _end(ledger, worker, phase)
    if ledger.stops:
        return instructions + _stop_next(ledger, at)
    instructions += starting.advance(ledger, worker.role, at)
    return instructions + (_stop_when_idle(ledger, at) if worker.task else [])


def _end(ledger: JobLedger, worker: WorkerRecord, phase: Phase) -> list[events.Instruction]:
    """Its bundle's place is given back with the last worker in it."""
    worker.address = worker.server_key = ""
    worker.noticed.clear()
    worker.to_notice.clear()
    ledger.set_phase(worker, phase)
    left = ledger.left_in_bundle[worker.bundle]
    return [] if left else starting.release(ledger, ledger.state.bundles[worker.bundle])


def failed_for_good(ledger: JobLedger, worker: WorkerRecord, code: int, at: float) -> list[events.Instruction]:
    """A worker that has died will not be created again: the job fails.

    After a task that is created again alone the other tasks go on, since they do not need it, unless a channel links them: its
    other ends would wait for ever. Without a service that is not essential the whole job goes on.
    """
    if not ledger.spec_of(worker).essential:
        return ended(ledger, worker, Phase.FAILED, at)
    outcome = failure(ledger, worker, code)
    alone = worker.task and ledger.scope_of(worker) is RestartScope.WORKER
    alone &= worker.role not in ledger.linked_by_channels
    if alone:
        ledger.state.failed_task = ledger.state.failed_task or outcome
        worker.settled = True
    if alone and not ledger.stops:
        return ended(ledger, worker, Phase.FAILED, at)
    return _end(ledger, worker, Phase.FAILED) + stop(ledger, outcome, at)


def failure(ledger: JobLedger, worker: WorkerRecord, code: int) -> events.Outcome:
    """Returns the outcome of a job that fails since this worker did.

    Its code is 1 for a death by signal, an unexpected 0, and an obstacle that has not passed.
    """
    log = ledger.spec_of(worker).log_of(worker.name) or f"logs/{worker.name}.log"
    reason = f"{worker.name} {worker.last_death}"[: events.LONGEST_REASON - 500]
    return events.Outcome(code if 0 < code < 126 and code != PASSING else 1, f"{reason} (log: {log})", worker.name)


def failed_to_stop(ledger: JobLedger, worker: WorkerRecord, code: int) -> None:
    """Notes a failure while stopping; the first failure is the one that counts."""
    decided = ledger.state.decided
    if decided is not None and decided.failed_worker is None and ledger.spec_of(worker).essential:
        outcome = failure(ledger, worker, code)
        kept = decided.code if _is_failure(decided) else outcome.code
        ledger.state.decided = events.Outcome(kept, outcome.reason, worker.name)


# --- what a living worker asked for, or failed to do ---


def extension_requested(
    ledger: JobLedger, worker: WorkerRecord, event: events.ExtensionRequested
) -> list[events.Instruction]:
    """Gives a worker that ends, or is not ready yet, and is not killed, more time."""
    starts = worker.phase is Phase.INITIALIZING and worker.deadline is not None
    is_due = starts or worker.ending or worker.phase in (Phase.STOPPING, Phase.RECYCLING)
    if is_due and not worker.killed and math.isfinite(event.seconds):
        ledger.set_deadline(worker, max(worker.deadline or event.at, event.at + event.seconds))
    return []


def suspect(
    ledger: JobLedger, worker: WorkerRecord, event: events.WorkerSuspected | events.WorkerHeard
) -> list[events.Instruction]:
    """Notes whether heartbeats of a worker are missing, for people; it is killed only once it is silent."""
    worker.suspected = isinstance(event, events.WorkerSuspected)
    ledger.changes[worker.name] = None
    return []


def silent(ledger: JobLedger, worker: WorkerRecord, event: events.WorkerSilent) -> list[events.Instruction]:
    """Kills a worker that is not heard of."""
    return [] if worker.ending else kill_stuck(ledger, worker, f"was silent for {event.seconds:g} s", event.at)


def replace_requested(
    ledger: JobLedger, worker: WorkerRecord, event: events.ReplaceRequested
) -> list[events.Instruction]:
    """Kills a worker that its SubMaster, and nobody else, wants to be created again."""
    by = ledger.current(event.by, event.by_incarnation)
    if by is None or by.rank >= 0 or worker.rank < 0 or worker.role != by.role or worker.settled or ledger.stops:
        return []
    return kill_stuck(ledger, worker, f"was found unfit by {by.name} ({event.reason})", event.at)


def kill_stuck(ledger: JobLedger, worker: WorkerRecord, words: str, at: float) -> list[events.Instruction]:
    """Kills a worker; its death is then handled like any other."""
    worker.stuck = words[: events.LONGEST_REASON]
    return ledger.move(worker, Phase.STUCK, at)


def due(ledger: JobLedger, event: events.Tick) -> list[events.Instruction]:
    """Decides about all whose deadlines have passed."""
    instructions: list[events.Instruction] = []
    while (record := ledger.take_due(event.at)) is not None:
        if isinstance(record, BundleRecord):
            instructions += starting.allocate(ledger, record)
        elif isinstance(record, RoleRecord):
            sub_master = ledger.sub_master(record.name)
            assert sub_master is not None
            seconds = ledger.roles[record.name].ready_timeout_seconds
            instructions += kill_stuck(ledger, sub_master, f"did not check its workers within {seconds:g} s", event.at)
        else:
            instructions += _overdue(ledger, record, event.at)
    return instructions


def _overdue(ledger: JobLedger, worker: WorkerRecord, at: float) -> list[events.Instruction]:
    if worker.ending:
        seconds = ledger.spec_of(worker).stop_timeout_seconds
        return kill_stuck(ledger, worker, f"did not end within {seconds:g} s of announcing its end", at)
    match worker.phase:
        case Phase.RESTARTING:
            ledger.set_phase(worker, Phase.WAITING)
            return starting.create_if_possible(ledger, worker, at)
        case Phase.CREATING:
            return kill_stuck(ledger, worker, "was not created in time", at)
        case Phase.INITIALIZING:
            return _not_ready(ledger, worker, at)
        case Phase.STARTING:
            return kill_stuck(ledger, worker, "did not begin to work in time", at)
        case Phase.STUCK:
            return _unkillable(ledger, worker, f"{worker.stuck} and could not be killed", at)
    if worker.killed:
        return _unkillable(ledger, worker, "could not be killed", at)
    worker.last_death = f"did not stop within {ledger.spec_of(worker).stop_timeout_seconds:g} s and was killed"
    if worker.phase is Phase.STOPPING:
        failed_to_stop(ledger, worker, 1)
    worker.killed = True
    return ledger.move(worker, worker.phase, at)


def _not_ready(ledger: JobLedger, worker: WorkerRecord, at: float) -> list[events.Instruction]:
    """A command that is not ready in its time would not be the next time; a worker of a class is created again."""
    role = ledger.spec_of(worker)
    worker.last_death = f"{NOT_READY} {role.ready_timeout_seconds:g} s"
    if role.command is None or not role.essential:
        return kill_stuck(ledger, worker, worker.last_death, at)
    outcome = failure(ledger, worker, 1)
    if not worker.task:
        return stop(ledger, outcome, at)
    ledger.state.failed_task = ledger.state.failed_task or outcome
    worker.settled = worker.killed = True
    return ledger.move(worker, Phase.STOPPING, at)


def _unkillable(ledger: JobLedger, worker: WorkerRecord, words: str, at: float) -> list[events.Instruction]:
    """A process that cannot be killed is stuck in the kernel: the job goes on without it, or fails."""
    worker.last_death = words
    if worker.phase is not Phase.STOPPING:
        return failed_for_good(ledger, worker, 1, at)
    failed_to_stop(ledger, worker, 1)
    return ended(ledger, worker, Phase.FAILED, at)


# --- more workers, or fewer: somebody asks for it, or there is no place for all of them ---


def scale(ledger: JobLedger, event: events.ScaleRequested) -> list[events.Instruction]:
    """Brings a role to so many workers. A count beyond the role's limits changes nothing."""
    role = ledger.state.roles.get(event.role)
    if role is None or ledger.stops or not ledger.state.begun:
        return []
    spec, before = ledger.roles[event.role], role.wanted
    if not spec.fewest <= event.count <= spec.most:
        return []
    role.wanted = event.count
    instructions: list[events.Instruction] = []
    for rank in range(before, event.count):
        instructions += _add(ledger, event.role, rank, event.at)
    for rank in reversed(range(event.count, before)):
        instructions += _take_out(ledger, event.role, rank, event.at)
    return instructions


def _add(ledger: JobLedger, role: str, rank: int, at: float) -> list[events.Instruction]:
    """Creates a worker of a new rank, or of one that had been taken out; one that is still ending will be created again."""
    worker = ledger.state.workers.get(worker_name(role, rank))
    if worker is None:
        worker = add_worker(ledger.state, ledger.spec, role, rank)
        ledger.index(worker, 1)
    elif worker.phase is Phase.REMOVED:
        ledger.set_phase(worker, Phase.WAITING)
    else:
        return []
    worker.unblocked = ledger.state.stage is not events.ManagerStage.INIT
    ledger.state.roles[role].changed.append(worker.name)
    bundle = ledger.state.bundles[worker.bundle]
    if bundle.place in (PlacementState.NONE, PlacementState.RELEASED):
        return starting.allocate(ledger, bundle)
    return starting.create_if_possible(ledger, worker, at)


def _take_out(ledger: JobLedger, role: str, rank: int, at: float) -> list[events.Instruction]:
    worker = ledger.state.workers[worker_name(role, rank)]
    if worker.phase in DEAD:
        return remove(ledger, worker, at)
    if worker.settled or worker.phase not in WELL | {Phase.CREATING}:  # it ends by itself, or has ended
        return []
    return ledger.move(worker, Phase.RECYCLING, at)


def remove(ledger: JobLedger, worker: WorkerRecord, at: float) -> list[events.Instruction]:
    """Takes a worker without a process out of its role, and has the SubMaster check those that are left."""
    role = ledger.state.roles[worker.role]
    role.changed.append(worker.name)
    ledger.void_check(role)
    return ended(ledger, worker, Phase.REMOVED, at)


def allocation_failed(ledger: JobLedger, event: events.AllocationFailed) -> list[events.Instruction]:
    """Tries again after a pause; without a place for good, goes on with one worker fewer, or stops the job.

    The highest rank leaves, whoever has no place, and so may leave its own place to it.
    """
    bundle = ledger.state.bundles.get(event.bundle)
    if bundle is None or bundle.attempt != event.attempt or bundle.place is not PlacementState.ALLOCATING:
        return []
    if not event.final or starting.use_all_nodes(ledger):
        starting.retry_later(ledger, bundle, event.at)
        return []
    worker = ledger.state.workers.get(bundle.workers[0])
    if worker is None or worker.rank < 0 or len(bundle.workers) > 1:
        return stop(ledger, starting.no_place(bundle, event.reason), event.at)
    wanted, leaving = ledger.state.roles[worker.role].wanted, ledger.number([Phase.RECYCLING], worker.role) > 0
    if not leaving and wanted <= ledger.spec_of(worker).fewest:
        return stop(ledger, starting.no_place(bundle, event.reason), event.at)
    if leaving or worker.rank < wanted - 1:
        starting.retry_later(ledger, bundle, event.at)
    return [] if leaving else scale(ledger, events.ScaleRequested(worker.role, wanted - 1, event.at))


# --- the end of the job ---


def stop_requested(ledger: JobLedger, event: events.JobStopRequested) -> list[events.Instruction]:
    """Stops the job at the first request, and kills it at a second one that is no repetition.

    A worker's never kills, and changes nothing while the job stops: the worker sees others end, as they were asked to.
    """
    state = ledger.state
    if event.by and ledger.stops:
        return []
    if not event.by:
        if state.stop_requested_at is not None and event.at - state.stop_requested_at < REPETITION_SECONDS:
            return []
        state.stop_requested_at = event.at
        state.stop_requests += 1
        if state.stop_requests > 1:
            state.decided = events.Outcome(event.code or 1, f"{event.reason}, twice: everything was killed")
            return _kill_all(ledger, event.at)
    failed = state.failed_task
    if failed is None:
        return stop(ledger, events.Outcome(event.code, event.reason), event.at)
    reason = f"{event.reason[: events.LONGEST_REASON // 2]}, after {failed.reason}"[: events.LONGEST_REASON]
    return stop(ledger, events.Outcome(event.code, reason, failed.failed_worker), event.at)


def _kill_all(ledger: JobLedger, at: float) -> list[events.Instruction]:
    instructions: list[events.Instruction] = []
    for worker in [worker for role in ledger.roles for worker in ledger.at(role, ALIVE)]:
        worker.killed = True
        instructions += ledger.move(worker, Phase.STOPPING, at)
    return instructions


def guests_changed(ledger: JobLedger, event: events.GuestsChanged) -> list[events.Instruction]:
    """Notes the guests; without any, the services may not be needed any more."""
    ledger.state.guests = list(event.guests)
    return _stop_when_idle(ledger, event.at)


def stop(ledger: JobLedger, outcome: events.Outcome, at: float) -> list[events.Instruction]:
    """Begins to stop the job. The first outcome counts, unless a later one is a failure."""
    state = ledger.state
    if state.decided is None or (outcome.code != 0 and not _is_failure(state.decided)):
        state.decided = outcome
    if ledger.stops:
        return _stop_next(ledger, at)
    ledger.set_stage(events.ManagerStage.STOPPING)
    instructions: list[events.Instruction] = []
    for role in state.roles.values():
        ledger.void_check(role)
        role.changed.clear()
    for worker in state.workers.values():
        if worker.phase in DEAD:
            instructions += _end(ledger, worker, Phase.STOPPED)
        elif worker.phase is Phase.RECYCLING:  # asked to end already
            ledger.set_phase(worker, Phase.STOPPING, worker.deadline)
    return instructions + _stop_next(ledger, at)


def _stop_next(ledger: JobLedger, at: float) -> list[events.Instruction]:
    """Asks the next group to stop once all groups before it have ended."""
    state = ledger.state
    instructions: list[events.Instruction] = []
    if state.outcome is not None:
        return instructions
    while state.stop_group < 0 or not ledger.left_in_group[state.stop_group]:
        if state.stop_group >= ledger.last_stop_group:
            state.outcome = _conclusion(ledger)
            ledger.set_stage(events.ManagerStage.STOPPED)
            return instructions
        state.stop_group += 1
        for worker in reversed(ledger.in_stop_group(state.stop_group)):
            if worker.phase not in ENDED | {Phase.STOPPING, Phase.STUCK}:
                instructions += ledger.move(worker, Phase.STOPPING, at)
    return instructions


def _stop_when_idle(ledger: JobLedger, at: float) -> list[events.Instruction]:
    """Stops the job once all its tasks have ended, unless it has guests or stays."""
    state = ledger.state
    if ledger.left_in_group[0] or state.guests or ledger.spec.stay or ledger.stops or not state.begun:
        return []
    left = _unsettled(ledger)
    names = ", ".join(left[:10]) + (f" and {len(left) - 10} more" if len(left) > 10 else "")
    early = events.Outcome(STOPPED_EARLY, f"stopped before the work of {names} was complete")
    return stop(ledger, state.failed_task or (early if left else DONE), at)


def _unsettled(ledger: JobLedger) -> list[str]:
    workers = ledger.state.workers.values()
    return [
        worker.name for worker in workers if worker.task and not worker.settled and worker.phase is not Phase.REMOVED
    ]


def _conclusion(ledger: JobLedger) -> events.Outcome:
    """Returns the outcome of the job.

    If its work was complete, a stop request does not count, except for a job that stays, which has no end of its own.
    """
    decided = ledger.state.decided
    assert decided is not None
    over = not ledger.spec.stay and not _unsettled(ledger)
    return (ledger.state.failed_task or DONE) if over and not _is_failure(decided) else decided


def _is_failure(outcome: events.Outcome) -> bool:
    """Whether the outcome is neither success nor an end by a signal."""
    return 0 < outcome.code < 128
