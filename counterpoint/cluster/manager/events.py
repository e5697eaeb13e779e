"""The vocabulary of the PrimeManager: what can happen to a job, and what is then to be done.

The state after every event that the manager accepts is durable before the instructions that follow from it are executed
(`counterpoint/cluster/master`), so events hold plain values: str, int, float, bool, and tuples of these; `reason`s are at most
`LONGEST_REASON` characters. An event about a worker names its incarnation; one of another incarnation than the current one is
stale, and changes nothing. `at` is in seconds by a clock of the job that never steps back, not even when masters change.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LONGEST_REASON = 2000
"""Characters of a reason; a longer one is cut where the event is made."""


class ManagerStage(StrEnum):
    """The stage of the job as a whole."""

    INIT = "INIT"
    READY = "READY"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


# --- events ---


@dataclass(frozen=True, slots=True)
class _OfWorker:
    """What concerns one incarnation of a worker."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class BeginJob:
    """The job starts."""

    at: float


@dataclass(frozen=True, slots=True)
class MasterChanged:
    """A master with this epoch took over: what was outstanding is to be done (again), by its epoch."""

    epoch: int
    at: float


@dataclass(frozen=True, slots=True)
class Allocated:
    """A bundle has a place. `attempt`: of the `Allocate` that this answers."""

    bundle: str
    attempt: int
    node: str
    """The node; empty if the backend learns it only when a worker is created there."""
    at: float


@dataclass(frozen=True, slots=True)
class AllocationFailed:
    """A bundle could not be placed now. `final`: it never can."""

    bundle: str
    attempt: int
    reason: str
    final: bool
    at: float


@dataclass(frozen=True, slots=True)
class Created(_OfWorker):
    """A worker's process runs on a node."""

    node: str
    pid: int
    at: float


@dataclass(frozen=True, slots=True)
class CreateFailed(_OfWorker):
    """A worker's process could not be started."""

    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class WorkerReady(_OfWorker):
    """A worker has passed its `self_check` (a command: sent `READY=1`). `address`: where it takes calls."""

    address: str
    server_key: str
    at: float


@dataclass(frozen=True, slots=True)
class WorkerStarted(_OfWorker):
    """A worker's `start` hook runs."""

    at: float


@dataclass(frozen=True, slots=True)
class WorkFinished(_OfWorker):
    """A worker's `start` hook returned; a service's process may go on to answer calls."""

    at: float


@dataclass(frozen=True, slots=True)
class EndAnnounced(_OfWorker):
    """A worker said that it is about to end (`STOPPING=1`): it has as long as after a request to stop."""

    at: float


@dataclass(frozen=True, slots=True)
class ExtensionRequested(_OfWorker):
    """A worker that ends, or is not ready yet, asked for so many seconds from now (`EXTEND_TIMEOUT_USEC`)."""

    seconds: float
    at: float


@dataclass(frozen=True, slots=True)
class WorkerExited(_OfWorker):
    """A worker's process has ended; `code` is 128 + signal if it was killed, `reason` a hook's exception, if any."""

    code: int
    reason: str
    at: float
    lost: bool = False
    """Whether it ended with its keeper, and not by itself: it is created again as after the loss of its node."""


@dataclass(frozen=True, slots=True)
class WorkerSuspected(_OfWorker):
    """Two heartbeats of a worker are missing: nothing was heard of it for so many seconds."""

    seconds: float
    at: float


@dataclass(frozen=True, slots=True)
class WorkerHeard(_OfWorker):
    """A worker that was suspected sent a heartbeat."""

    at: float


@dataclass(frozen=True, slots=True)
class WorkerSilent(_OfWorker):
    """A worker missed its heartbeats for so many seconds."""

    seconds: float
    at: float


@dataclass(frozen=True, slots=True)
class ChildrenChecked(_OfWorker):
    """A SubMaster's `check_child` returned, for the check of that number."""

    check: int
    at: float


@dataclass(frozen=True, slots=True)
class FailoverDone(_OfWorker):
    """A worker's `on_failover` returned, for the notice of that number."""

    notice: int
    at: float


@dataclass(frozen=True, slots=True)
class ReplaceRequested:
    """A SubMaster asked to have a worker of its role created again."""

    by: str
    by_incarnation: int
    worker: str
    incarnation: int
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class ScaleRequested:
    """A role is to have so many workers, between its limits."""

    role: str
    count: int
    at: float


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone, with everything on it (its keeper does not answer, or the backend says so)."""

    node: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class JobStopRequested:
    """The job is to stop; a second request at least a second later kills it.

    `code` is its exit code if everything ends cleanly before its work is complete. `by`: the worker that asked, or empty; the
    requests of workers never kill.
    """

    reason: str
    code: int
    by: str
    at: float


@dataclass(frozen=True, slots=True)
class GuestsChanged:
    """The guests of the job changed: its services go on for them after its tasks have ended."""

    guests: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline that the manager named may have passed."""

    at: float


Event = (
    BeginJob
    | MasterChanged
    | Allocated
    | AllocationFailed
    | Created
    | CreateFailed
    | WorkerReady
    | WorkerStarted
    | WorkFinished
    | EndAnnounced
    | ExtensionRequested
    | WorkerExited
    | WorkerSuspected
    | WorkerHeard
    | WorkerSilent
    | ChildrenChecked
    | FailoverDone
    | ReplaceRequested
    | ScaleRequested
    | NodeLost
    | JobStopRequested
    | GuestsChanged
    | Tick
)


# --- instructions: each may be repeated after a change of masters, so whoever executes them is idempotent ---


@dataclass(frozen=True, slots=True)
class Allocate:
    """Find a place for a bundle: answered by `Allocated` or `AllocationFailed`."""

    bundle: str
    attempt: int
    """Counts from 1 for each bundle; an answer to an earlier attempt is stale."""
    workers: tuple[str, ...]
    avoid: tuple[str, ...] = ()
    """Nodes that are set aside because they failed several times."""


@dataclass(frozen=True, slots=True)
class Create(_OfWorker):
    """Start a worker's process: answered by `Created` or `CreateFailed`. `again`: not for the first time."""

    bundle: str
    again: bool


@dataclass(frozen=True, slots=True)
class CheckChildren(_OfWorker):
    """Call the SubMaster's `check_child`: answered by `ChildrenChecked`, or its end."""

    check: int


@dataclass(frozen=True, slots=True)
class Start(_OfWorker):
    """Call the worker's `start`: answered by `WorkerStarted`."""


@dataclass(frozen=True, slots=True)
class Failover(_OfWorker):
    """Call the worker's `on_failover` with the `failed` workers: answered by `FailoverDone`."""

    notice: int
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopWorker(_OfWorker):
    """Ask the worker to end (SIGTERM for a command): answered by `WorkerExited`."""


@dataclass(frozen=True, slots=True)
class Kill(_OfWorker):
    """Kill the worker and everything below it: answered by `WorkerExited`."""


@dataclass(frozen=True, slots=True)
class Release:
    """Give a bundle's place back; nothing answers."""

    bundle: str


Instruction = Allocate | Create | CheckChildren | Start | Failover | StopWorker | Kill | Release


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    code: int
    """0 only if its work is complete."""
    reason: str
    """The reason, for a person; names the worker, its exception or exit code, and the path of its log."""
    failed_worker: str | None = None
    """The worker whose output explains the reason."""
