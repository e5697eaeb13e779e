"""The vocabulary of elastic training: what `rounds.Rounds` is told, and what it then wants to be done.

A *round* is one start of the training on a fixed set of workers; an *attempt* is one node check. A worker is known by name and
incarnation; what is said about another incarnation, round or attempt than the current one is stale, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class WorkerId(NamedTuple):
    """One life of a worker."""

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name} (incarnation {self.incarnation})"


class RoundsStage(StrEnum):
    """The stage of the training as a whole."""

    GATHERING = "GATHERING"
    """Waiting for enough workers."""
    CHECKING = "CHECKING"
    """Their nodes are being checked."""
    READY = "READY"
    """The nodes are good; the job has not started yet."""
    RENDEZVOUS = "RENDEZVOUS"
    """The ranks are being started, and find one another."""
    TRAINING = "TRAINING"
    """All ranks of the round run."""
    STOPPING_ALL = "STOPPING_ALL"
    """Every worker is to end its ranks, before another round or the end."""
    ENDED = "ENDED"
    """The job ends, as `Rounds.ending` says."""


class Activity(StrEnum):
    """What a worker does with its ranks."""

    IDLE = "IDLE"
    """The worker has no ranks."""
    JOINING = "JOINING"
    """They are being started."""
    TRAINING = "TRAINING"
    """The ranks of the worker run."""
    SUCCEEDED = "SUCCEEDED"
    """All of them ended with code 0."""
    FAILED = "FAILED"
    """One of them failed, and the others were ended."""


HAS_RANKS = frozenset({Activity.JOINING, Activity.TRAINING})


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules by which a round starts, and how often one may fail."""

    min_workers: int
    max_workers: int
    join_seconds: float = 30.0
    """How long enough workers wait for more of them, up to `max_workers`."""
    give_up_seconds: float = 600.0
    """How long fewer than `min_workers` wait; then the training fails."""
    settle_seconds: float = 2.0
    """Time that passes after a worker came during training, before the round ends for it: others may come too."""
    stop_seconds: float = 40.0
    """How long a worker may take to end its ranks; then it is replaced."""
    max_restarts: int = 10
    """How many rounds in a row may fail by the script's own fault."""
    healthy_seconds: float = 180.0
    """Seconds of training after which failed rounds are counted anew."""
    max_check_failures: int = 3
    """Failed checks in a row after which a worker's node is set aside."""
    check: bool = True
    """Whether nodes are checked at all."""
    straggler_ratio: float = 0.5
    """A node is a straggler below this share of the median rate."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates of one node alone, by name; higher is better."""

    rates: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says of itself. `round` and `members` are those of the last round it was in; 0 and none before that."""

    activity: Activity
    round: int = 0
    members: tuple[WorkerId, ...] = ()
    reason: str = ""


# --- events ---


@dataclass(frozen=True, slots=True)
class Begin:
    """The SubMaster starts: these are the living workers, with what each said of itself. A round may be under way."""

    reports: dict[WorkerId, Report]
    at: float
    finished: frozenset[str] = frozenset()
    """Names of workers that have finished: an earlier SubMaster told them that the training is complete, or they were removed."""


@dataclass(frozen=True, slots=True)
class Released:
    """The whole job is ready: training may start."""

    at: float


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker is ready."""

    worker: WorkerId
    at: float


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """A worker is dead, or has left."""

    worker: WorkerId
    at: float


@dataclass(frozen=True, slots=True)
class NodeMeasured:
    """Answers `MeasureNode`; None if it failed."""

    attempt: int
    worker: WorkerId
    measured: Measured | None
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class PairChecked:
    """Answers `CheckPair`: the duration of the collective, None if it failed."""

    attempt: int
    first: WorkerId
    second: WorkerId
    seconds: float | None
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Reported:
    """A worker said what it does."""

    worker: WorkerId
    report: Report
    at: float


@dataclass(frozen=True, slots=True)
class Unresponsive:
    """A worker did not do what it was asked to do: it is to be replaced."""

    worker: WorkerId
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Expected:
    """How many workers exist or are being created: a round does not wait for more."""

    count: int
    at: float


@dataclass(frozen=True, slots=True)
class Tick:
    """`Rounds.deadline` may have passed."""

    at: float


Event = (
    Begin | Released | WorkerUp | WorkerDown | NodeMeasured | PairChecked | Reported | Unresponsive | Expected | Tick
)


# --- instructions ---


@dataclass(frozen=True, slots=True)
class MeasureNode:
    """Measure the node of a worker alone: answered by `NodeMeasured`."""

    attempt: int
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class CheckPair:
    """Run a collective between two workers' nodes: answered by `PairChecked`."""

    attempt: int
    first: WorkerId
    second: WorkerId


@dataclass(frozen=True, slots=True)
class EndCheck:
    """The check is over: the workers may free what it used."""

    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class StartRound:
    """Start the ranks of a round on these workers: `Reported` tells how it goes."""

    round: int
    members: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class StopRound:
    """End the ranks of these workers: `Reported` as IDLE once done."""

    round: int
    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class Replace:
    """Have a worker killed and created again, on its node or another."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Log a line for people."""

    text: str


@dataclass(frozen=True, slots=True)
class Ending:
    """How the training ended."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The training has ended: the workers are to finish."""

    ending: Ending


Instruction = MeasureNode | CheckPair | EndCheck | StartRound | StopRound | Replace | Tell | End
