"""Who is created again, and who leaves: after a death, and when a role gets more workers or fewer.

By its role's restart scope the worker alone is created again, or all of its role, or the whole job: those are asked to end
first, *recycled*. The scope counts for a worker that had begun to work; one that died before that has left no mark on others, and
is created again alone. The deaths of a worker in a row are bounded; those with a lost node or an agent, and those of a full disk,
do not count.
"""

from __future__ import annotations

import math

from counterpoint.cluster.exit_codes import ASKED_TO_END, describe_exit
from counterpoint.cluster.manager.events import (
    LONGEST_REASON,
    CreateFailed,
    EndAnnounced,
    ExtensionRequested,
    Instruction,
    Kill,
    ManagerStage,
    NodeLost,
    ReplaceRequested,
    ScaleRequested,
    Stop,
    WorkerExited,
    WorkerHeard,
    WorkerSilent,
    WorkerSuspected,
)
from counterpoint.cluster.manager.starting import allocate, create_if_possible, lose_node, release_held, retry_later
from counterpoint.cluster.manager.state import (
    ALIVE,
    DEAD,
    WELL,
    BundleRecord,
    Ledger,
    Phase,
    Place,
    WorkerRecord,
    add_worker,
)
from counterpoint.cluster.manager.stopping import (
    ended,
    failed_for_good,
    failed_to_stop,
    failure,
    kill_for_good,
    kill_grace,
    stop,
)
from counterpoint.cluster.spec import RestartScope, worker_name
from counterpoint.transport.process.permanent_errors import DISK_FULL

FIRST_BACKOFF_SECONDS = 1.0
"""Between a death and the first restart; doubled for each further restart in a row."""

LONGEST_BACKOFF_SECONDS = 30.0
"""The limit of the doubling."""

HEALTHY_SECONDS = 180.0
"""After a worker was ready for this long, its restarts are counted anew."""

FINAL_CODES = frozenset({2, 3})
"""Exit codes after which a restart would end alike: a bad configuration, an eviction."""


# --- ends ---


def exited(ledger: Ledger, event: WorkerExited) -> list[Instruction]:
    """Decides what the end of a process means."""
    worker = ledger.current(event.worker, event.incarnation)
    if worker is None:
        return []
    code, at, command = event.code, event.at, ledger.spec_of(worker).command is not None
    in_order = code == 0 or code in ASKED_TO_END or event.lost
    if code == 0 and worker.task and command:
        worker.settled = True  # of a class, only `WorkFinished` says so: its process may end with 0 for other reasons
    if worker.rank < 0 and ledger.stops and code > 128 and not worker.killed:
        # Killed by another hand. Its workers are stopped without it, and it has no work of its own.
        worker.last_death = words_of(event)
        return ended(ledger, worker, Phase.STOPPED, at)
    if worker.phase is Phase.STOPPING:
        clean = in_order and not worker.killed
        if not clean and not worker.killed:  # why a killed one was killed is known already
            worker.last_death = f"{words_of(event)} while it was being stopped"
            failed_to_stop(ledger, worker, code)
        return ended(ledger, worker, Phase.STOPPED if clean else Phase.FAILED, at)
    told = code in ASKED_TO_END and worker.task and command and worker.phase is not Phase.RECYCLING  # by another hand
    if worker.settled or told or (in_order and ledger.stops):
        return ended(ledger, worker, Phase.STOPPED, at)  # its work is done; or its peers had gone, and it ended, too
    if worker.phase is Phase.RECYCLING or _surplus(ledger, worker):
        return _hold(ledger, worker, at)
    if worker.rank < 0 and ledger.unended[worker.role] == 0:
        return ended(ledger, worker, Phase.STOPPED, at)
    words = words_of(event) + (", although the job still needs it" if code == 0 else "")
    if worker.stuck:  # of a node that is gone, nobody can say that it was killed there
        words = f"{worker.stuck}, and {words}" if event.lost or event.reason else f"{worker.stuck} and was killed"
    return died(ledger, worker, code, words, at, with_node=event.lost)


def words_of(event: WorkerExited) -> str:
    """Describes the end of a process, for a person."""
    if event.lost:
        return f"was lost: {event.reason}"
    return describe_exit(event.code) + (f": {event.reason}" if event.reason else "")


def create_failed(ledger: Ledger, event: CreateFailed) -> list[Instruction]:
    """Handles it as a death, since the cause (a full disk, no memory) may be gone at the next attempt."""
    worker = ledger.current(event.worker, event.incarnation)
    if worker is None:
        return []
    if worker.phase is Phase.STOPPING:
        return ended(ledger, worker, Phase.STOPPED, event.at)
    if worker.phase is Phase.RECYCLING or _surplus(ledger, worker):
        return _hold(ledger, worker, event.at)
    worker.ready_since = None
    return died(ledger, worker, 1, f"could not be started: {event.reason}", event.at)


def node_lost(ledger: Ledger, event: NodeLost) -> list[Instruction]:
    """Places all that was on the node elsewhere."""
    bundles = lose_node(ledger, event.node, event.at)
    instructions: list[Instruction] = []
    for bundle in bundles:
        if ledger.left_in_bundle[bundle.name] and not ledger.stops:
            instructions += allocate(ledger, bundle)
    for bundle in bundles:
        for name in bundle.workers:
            worker = ledger.state.workers.get(name)
            if worker is not None and worker.phase in ALIVE:
                instructions += _lost(ledger, worker, event)
    return instructions


def _lost(ledger: Ledger, worker: WorkerRecord, event: NodeLost) -> list[Instruction]:
    if worker.settled or worker.phase is Phase.STOPPING or ledger.stops:
        return ended(ledger, worker, Phase.FAILED if worker.killed else Phase.STOPPED, event.at)
    if worker.phase is Phase.RECYCLING or _surplus(ledger, worker):
        return _hold(ledger, worker, event.at)
    words = f"was lost with node {event.node}: {event.reason}"
    return died(ledger, worker, 1, words, event.at, with_node=True)


def _surplus(ledger: Ledger, worker: WorkerRecord) -> bool:
    """Whether its role has fewer workers by now."""
    return worker.rank >= ledger.state.roles[worker.role].wanted


# --- deaths ---


def died(
    ledger: Ledger, worker: WorkerRecord, code: int, words: str, at: float, with_node: bool = False
) -> list[Instruction]:
    """Creates a worker that ended unexpectedly again, by its role's scope, or gives it up."""
    worker.last_death = words[:LONGEST_REASON]
    if worker.ready_since is not None and at - worker.ready_since >= HEALTHY_SECONDS:
        worker.deaths = 0
    counts = not with_node and code != DISK_FULL
    over = counts and (code in FINAL_CODES or worker.deaths >= ledger.spec_of(worker).max_restarts)
    if ledger.stops or over:
        return failed_for_good(ledger, worker, code, at)
    pause = min(FIRST_BACKOFF_SECONDS * 2 ** min(worker.deaths, 10), LONGEST_BACKOFF_SECONDS)
    if not counts:
        pause = 0.0 if with_node else LONGEST_BACKOFF_SECONDS
    worker.deaths += counts
    worker.restarts += 1
    scope = ledger.scope_of(worker) if worker.launched else RestartScope.WORKER
    if worker.rank >= 0:
        ledger.state.roles[worker.role].changed.append(worker.name)
    _forget_process(worker)
    if scope is RestartScope.WORKER:
        ledger.set_phase(worker, Phase.RESTARTING, at + pause)
        return []
    ledger.set_phase(worker, Phase.HELD)
    if scope is RestartScope.ROLE:
        instructions = _recycle_role(ledger, worker.role, at, at + pause)
        release_held(ledger, worker.role, at)
        return instructions
    ledger.state.restarting_all = True
    ledger.state.stage = ManagerStage.INIT
    instructions = [request for role in ledger.roles for request in _recycle_role(ledger, role, at, at + pause)]
    release_held(ledger, worker.role, at)
    return instructions


def _forget_process(worker: WorkerRecord) -> None:
    worker.address = worker.server_key = worker.node = worker.stuck = ""
    worker.pid = 0
    worker.ready_since = None
    worker.ending = worker.launched = worker.killed = False
    worker.noticed.clear()
    worker.to_notice.clear()


# --- recycling ---


def _recycle_role(ledger: Ledger, role: str, at: float, not_before: float) -> list[Instruction]:
    """Asks all of a role to end and be created again; of the whole job, the SubMasters as well."""
    record = ledger.state.roles[role]
    record.not_before = max(record.not_before, not_before)
    instructions: list[Instruction] = []
    for worker in ledger.in_order(ledger.members[role]):
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
            instructions += recycle(ledger, worker, at)
    return instructions


def recycle(ledger: Ledger, worker: WorkerRecord, at: float) -> list[Instruction]:
    """Asks a worker to end, to be created again or to be removed."""
    worker.ending = False
    ledger.set_phase(worker, Phase.RECYCLING, at + ledger.spec_of(worker).stop_timeout_seconds)
    return [Stop(worker.name, worker.incarnation)]


def _hold(ledger: Ledger, worker: WorkerRecord, at: float) -> list[Instruction]:
    """Notes the end of a worker that was recycled."""
    _forget_process(worker)
    if _surplus(ledger, worker):
        return remove(ledger, worker, at)
    ledger.set_phase(worker, Phase.HELD)
    release_held(ledger, worker.role, at)
    return []


def remove(ledger: Ledger, worker: WorkerRecord, at: float) -> list[Instruction]:
    """Takes a worker without a process out of its role, and has the SubMaster check those that are left."""
    role = ledger.state.roles[worker.role]
    role.changed.append(worker.name)
    ledger.void_check(role)
    return ended(ledger, worker, Phase.REMOVED, at)


# --- what a living worker did, or failed to do ---


def end_announced(ledger: Ledger, event: EndAnnounced) -> list[Instruction]:
    """Gives the worker as long to end as after a request."""
    worker = ledger.current(event.worker, event.incarnation)
    if worker is not None and worker.phase in WELL and not worker.ending:
        worker.ending = True
        ledger.set_deadline(worker, event.at + ledger.spec_of(worker).stop_timeout_seconds)
    return []


def extension_requested(ledger: Ledger, event: ExtensionRequested) -> list[Instruction]:
    """Gives a worker that ends, and is not killed yet, more time."""
    worker = ledger.current(event.worker, event.incarnation)
    if worker is None or not math.isfinite(event.seconds):
        return []
    if (worker.ending or worker.phase in (Phase.STOPPING, Phase.RECYCLING)) and not worker.killed:
        ledger.set_deadline(worker, max(worker.deadline or event.at, event.at + event.seconds))
    return []


def suspect(ledger: Ledger, event: WorkerSuspected | WorkerHeard) -> list[Instruction]:
    """Notes whether heartbeats of a worker are missing, for people; it is killed only once it is silent."""
    worker = ledger.current(event.worker, event.incarnation)
    if worker is not None and worker.phase in WELL:
        worker.suspected = isinstance(event, WorkerSuspected)
        ledger.changes[worker.name] = None
    return []


def silent(ledger: Ledger, event: WorkerSilent) -> list[Instruction]:
    """Kills a worker that is not heard of."""
    worker = ledger.current(event.worker, event.incarnation)
    if worker is None or worker.phase not in WELL or worker.ending:
        return []
    return kill_stuck(ledger, worker, f"was silent for {event.seconds:g} s", event.at)


def replace_requested(ledger: Ledger, event: ReplaceRequested) -> list[Instruction]:
    """Kills a worker that its SubMaster, and nobody else, wants to be created again."""
    by, worker = ledger.current(event.by, event.by_incarnation), ledger.current(event.worker, event.incarnation)
    if by is None or by.rank >= 0 or worker is None or worker.rank < 0 or worker.role != by.role:
        return []
    if worker.phase not in WELL | {Phase.CREATING} or worker.settled or ledger.stops:
        return []
    return kill_stuck(ledger, worker, f"was found unfit by {by.name} ({event.reason})", event.at)


def kill_stuck(ledger: Ledger, worker: WorkerRecord, words: str, at: float) -> list[Instruction]:
    """Kills a worker; its death is then handled like any other."""
    worker.stuck = words[:LONGEST_REASON]
    worker.ending = False
    ledger.set_phase(worker, Phase.STUCK, at + kill_grace(ledger))
    return [Kill(worker.name, worker.incarnation)]


def overdue(ledger: Ledger, worker: WorkerRecord, at: float) -> list[Instruction]:
    """Decides about a worker whose deadline has passed."""
    role = ledger.spec_of(worker)
    if worker.phase is Phase.RESTARTING:
        ledger.set_phase(worker, Phase.WAITING)
        return create_if_possible(ledger, worker, at)
    if worker.ending:
        return kill_stuck(
            ledger, worker, f"did not end within {role.stop_timeout_seconds:g} s of announcing its end", at
        )
    if worker.phase is Phase.STUCK:
        return _unkillable(ledger, worker, f"{worker.stuck} and could not be killed", at)
    if worker.phase is Phase.CREATING:
        return kill_stuck(ledger, worker, "was not created in time", at)
    if worker.phase is Phase.STARTING:
        return kill_stuck(ledger, worker, "did not begin to work in time", at)
    if worker.phase is Phase.INITIALIZING:
        return _not_ready(ledger, worker, at)
    return _did_not_stop(ledger, worker, at)


def _not_ready(ledger: Ledger, worker: WorkerRecord, at: float) -> list[Instruction]:
    """A command that is not ready in its time would not be the next time; a worker of a class is created again."""
    role = ledger.spec_of(worker)
    worker.last_death = f"was not ready within {role.ready_timeout_seconds:g} s"
    if role.command is None:
        return kill_stuck(ledger, worker, worker.last_death, at)
    if not role.essential:
        return kill_stuck(ledger, worker, worker.last_death, at)
    outcome = failure(ledger, worker, 1)
    if not worker.task:
        return stop(ledger, outcome, at)
    ledger.state.failed_task = ledger.state.failed_task or outcome
    worker.settled = True
    return kill_for_good(ledger, worker, at)


def _did_not_stop(ledger: Ledger, worker: WorkerRecord, at: float) -> list[Instruction]:
    if worker.killed:
        return _unkillable(ledger, worker, "could not be killed", at)
    worker.last_death = f"did not stop within {ledger.spec_of(worker).stop_timeout_seconds:g} s and was killed"
    if worker.phase is Phase.STOPPING:
        failed_to_stop(ledger, worker, 1)
        return kill_for_good(ledger, worker, at)
    worker.killed = True
    ledger.set_phase(worker, worker.phase, at + kill_grace(ledger))
    return [Kill(worker.name, worker.incarnation)]


def _unkillable(ledger: Ledger, worker: WorkerRecord, words: str, at: float) -> list[Instruction]:
    """A process that cannot be killed is stuck in the kernel: the job goes on without it, or fails."""
    worker.last_death = words
    if worker.phase is Phase.STOPPING:
        failed_to_stop(ledger, worker, 1)
        return ended(ledger, worker, Phase.FAILED, at)
    return failed_for_good(ledger, worker, 1, at)


# --- more workers, or fewer: somebody asks for it, or there is no place for all of them ---


def scale(ledger: Ledger, event: ScaleRequested) -> list[Instruction]:
    """Brings a role to so many workers. A count beyond the role's limits changes nothing."""
    role = ledger.state.roles.get(event.role)
    if role is None or ledger.stops or not ledger.state.begun:
        return []
    spec, before = ledger.roles[event.role], role.wanted
    if not spec.fewest <= event.count <= spec.most:
        return []
    role.wanted = event.count
    instructions: list[Instruction] = []
    for rank in range(before, event.count):
        instructions += _add(ledger, event.role, rank, event.at)
    for rank in reversed(range(event.count, before)):
        instructions += _take_out(ledger, event.role, rank, event.at)
    return instructions


def _add(ledger: Ledger, role: str, rank: int, at: float) -> list[Instruction]:
    """Creates a worker of a new rank, or of one that had been taken out; one that is still ending will be created again."""
    worker = ledger.state.workers.get(worker_name(role, rank))
    if worker is None:
        worker = add_worker(ledger.state, ledger.spec, role, rank)
        ledger.add(worker)
    elif worker.phase is Phase.REMOVED:
        ledger.set_phase(worker, Phase.WAITING)
    else:
        return []
    worker.unblocked = ledger.state.stage is not ManagerStage.INIT
    ledger.state.roles[role].changed.append(worker.name)
    bundle = ledger.state.bundles[worker.bundle]
    if bundle.place in (Place.NONE, Place.RELEASED):
        return allocate(ledger, bundle)
    return create_if_possible(ledger, worker, at)


def _take_out(ledger: Ledger, role: str, rank: int, at: float) -> list[Instruction]:
    worker = ledger.state.workers[worker_name(role, rank)]
    if worker.phase in DEAD:
        return remove(ledger, worker, at)
    if worker.settled or worker.phase not in WELL | {Phase.CREATING}:  # it ends by itself, or has ended
        return []
    return recycle(ledger, worker, at)


def make_room(ledger: Ledger, bundle: BundleRecord, at: float) -> list[Instruction] | None:
    """Goes on with one worker fewer if a worker can never be placed; None if its role needs all that it has.

    The highest rank leaves, whoever has no place, and so may leave its own place to it.
    """
    worker = ledger.state.workers.get(bundle.workers[0])
    if worker is None or worker.rank < 0 or len(bundle.workers) > 1:
        return None
    role = ledger.state.roles[worker.role]
    leaving = ledger.recycling[worker.role] > 0
    if not leaving and role.wanted <= ledger.spec_of(worker).fewest:
        return None
    if leaving or worker.rank < role.wanted - 1:
        retry_later(ledger, bundle, at)
    return [] if leaving else scale(ledger, ScaleRequested(worker.role, role.wanted - 1, at))
