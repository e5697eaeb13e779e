"""The end of a job: which outcome it has, and in which order its workers stop.

All tasks stop first, at once, since they do not need one another; then role by role in reverse, as `JobSpec.stop_order` says, the
workers of a role at once and its SubMaster after them, since a service may need those before it to end well.
"""

from __future__ import annotations

import signal

from counterpoint.cluster.manager.events import (
    LONGEST_REASON,
    Instruction,
    Kill,
    ManagerStage,
    Outcome,
    Stop,
    StopRequested,
)
from counterpoint.cluster.manager.starting import advance, release
from counterpoint.cluster.manager.state import ALIVE, DEAD, ENDED, Ledger, Phase, WorkerRecord
from counterpoint.cluster.spec import RestartScope
from counterpoint.transport.process.stop_requests import REPETITION_SECONDS

KILL_GRACE_SECONDS = 15.0
"""A killed process on a node that can be reached, and that exists after this, is stuck in the kernel."""

FENCE_LEASES = 3
"""A node that cannot be reached has shown its silence, and ended its workers by itself, after so many leases of the job."""

STOPPED_EARLY = 128 + signal.SIGTERM
"""Exit code of a job whose tasks were stopped one by one before their work was complete."""

DONE = Outcome(0, "done")


def kill_grace(ledger: Ledger) -> float:
    """Returns how long the end of a killed worker may take; after it the job goes on without the worker, and reports it."""
    return KILL_GRACE_SECONDS + FENCE_LEASES * ledger.spec.lease_seconds


def failure(ledger: Ledger, worker: WorkerRecord, code: int) -> Outcome:
    """Returns the outcome of a job that fails since this worker did; 1 for a death by signal or an unexpected 0."""
    log = ledger.spec_of(worker).log_of(worker.name) or f"logs/{worker.name}.log"
    reason = f"{worker.name} {worker.last_death}"[: LONGEST_REASON - 500]
    return Outcome(code if 0 < code < 126 else 1, f"{reason} (log: {log})", worker.name)


def stop_requested(ledger: Ledger, event: StopRequested) -> list[Instruction]:
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
            state.decided = Outcome(event.code or 1, f"{event.reason}, twice: everything was killed")
            alive = ledger.in_order(worker.name for worker in state.workers.values() if worker.phase in ALIVE)
            return [kill for worker in alive for kill in kill_for_good(ledger, worker, event.at)]
    failed = state.failed_task
    if failed is None:
        return stop(ledger, Outcome(event.code, event.reason), event.at)
    reason = f"{event.reason[: LONGEST_REASON // 2]}, after {failed.reason}"[:LONGEST_REASON]
    return stop(ledger, Outcome(event.code, reason, failed.failed_worker), event.at)


def stop(ledger: Ledger, outcome: Outcome, at: float) -> list[Instruction]:
    """Begins to stop the job. The first outcome counts, unless a later one is a failure."""
    state = ledger.state
    if state.decided is None or (outcome.code != 0 and not _is_failure(state.decided)):
        state.decided = outcome
    if ledger.stops:
        return _stop_next(ledger, at)
    state.stage = ManagerStage.STOPPING
    instructions: list[Instruction] = []
    for role in state.roles.values():
        ledger.void_check(role)
        role.changed.clear()
    for worker in state.workers.values():
        if worker.phase in DEAD:
            instructions += _end(ledger, worker, Phase.STOPPED)
        elif worker.phase is Phase.RECYCLING:  # asked to end already
            ledger.set_phase(worker, Phase.STOPPING, worker.deadline)
    return instructions + _stop_next(ledger, at)


def _stop_next(ledger: Ledger, at: float) -> list[Instruction]:
    """Asks the next group to stop once all groups before it have ended."""
    state = ledger.state
    instructions: list[Instruction] = []
    if state.outcome is not None:
        return instructions
    while state.stop_group < 0 or ledger.alive_in_group[state.stop_group] == 0:
        if state.stop_group >= ledger.last_stop_group:
            state.outcome = _conclusion(ledger)
            state.stage = ManagerStage.STOPPED
            return instructions
        state.stop_group += 1
        instructions += _stop_group(ledger, state.stop_group, at)
    return instructions


def _stop_group(ledger: Ledger, group: int, at: float) -> list[Instruction]:
    if ledger.alive_in_group[group] == 0:
        return []
    instructions: list[Instruction] = []
    for worker in reversed(ledger.in_order(ledger.in_stop_group(group))):
        if worker.phase not in ENDED | {Phase.STOPPING, Phase.STUCK}:
            worker.ending = False
            ledger.set_phase(worker, Phase.STOPPING, at + ledger.spec_of(worker).stop_timeout_seconds)
            instructions.append(Stop(worker.name, worker.incarnation))
    return instructions


def kill_for_good(ledger: Ledger, worker: WorkerRecord, at: float) -> list[Instruction]:
    """Kills a worker that is not to be created again."""
    worker.ending = False
    worker.killed = True
    ledger.set_phase(worker, Phase.STOPPING, at + kill_grace(ledger))
    return [Kill(worker.name, worker.incarnation)]


def ended(ledger: Ledger, worker: WorkerRecord, phase: Phase, at: float) -> list[Instruction]:
    """Notes that a worker has ended for good, and does what follows."""
    instructions = _end(ledger, worker, phase)
    if ledger.stops:
        return instructions + _stop_next(ledger, at)
    instructions += advance(ledger, worker.role, at)
    return instructions + (stop_when_idle(ledger, at) if worker.task else [])


def _end(ledger: Ledger, worker: WorkerRecord, phase: Phase) -> list[Instruction]:
    """Its bundle's place is given back with the last worker in it."""
    worker.address = worker.server_key = ""
    worker.ending = False
    worker.noticed.clear()
    worker.to_notice.clear()
    ledger.set_phase(worker, phase)
    left = ledger.left_in_bundle[worker.bundle]
    return [] if left else release(ledger, ledger.state.bundles[worker.bundle])


def failed_for_good(ledger: Ledger, worker: WorkerRecord, code: int, at: float) -> list[Instruction]:
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
    instructions = _end(ledger, worker, Phase.FAILED)
    return instructions + stop(ledger, outcome, at)


def failed_to_stop(ledger: Ledger, worker: WorkerRecord, code: int) -> None:
    """Notes a failure while stopping; the first failure is the one that counts."""
    decided = ledger.state.decided
    if decided is not None and decided.failed_worker is None and ledger.spec_of(worker).essential:
        outcome = failure(ledger, worker, code)
        kept = decided.code if _is_failure(decided) else outcome.code
        ledger.state.decided = Outcome(kept, outcome.reason, worker.name)


def stop_when_idle(ledger: Ledger, at: float) -> list[Instruction]:
    """Stops the job once all its tasks have ended, unless it has guests or stays."""
    state = ledger.state
    if ledger.unended_tasks or state.guests or ledger.spec.stay or ledger.stops or not state.begun:
        return []
    left = _unsettled(ledger)
    names = ", ".join(left[:10]) + (f" and {len(left) - 10} more" if len(left) > 10 else "")
    early = Outcome(STOPPED_EARLY, f"stopped before the work of {names} was complete")
    return stop(ledger, state.failed_task or (early if left else DONE), at)


def _unsettled(ledger: Ledger) -> list[str]:
    workers = ledger.state.workers.values()
    return [
        worker.name for worker in workers if worker.task and not worker.settled and worker.phase is not Phase.REMOVED
    ]


def _conclusion(ledger: Ledger) -> Outcome:
    """Returns the outcome of the job.

    If its work was complete, a stop request does not count, except for a job that stays, which has no end of its own.
    """
    decided = ledger.state.decided
    assert decided is not None
    over = not ledger.spec.stay and not _unsettled(ledger)
    return (ledger.state.failed_task or DONE) if over and not _is_failure(decided) else decided


def _is_failure(outcome: Outcome) -> bool:
    """Whether the outcome is neither success nor an end by a signal."""
    return 0 < outcome.code < 128
