"""What the experiment's state machine hears, and what it asks for. Most events of executors (`executor.py`) come as they are.

Each event that is accepted is journalled before its instructions are carried out, so an event holds data only, and everything
that depended on a clock, on free resources or on chance outside a scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.executors import executor
from counterpoint.tune.result import Result
from counterpoint.tune.trial import Trial

# --- events ---


@dataclass(frozen=True, slots=True)
class TrialsProposed:
    """The search algorithm has answered `AskSearch`."""

    trials: tuple[Trial, ...]
    search_state: dict[str, Any]
    """Its state after these proposals."""
    heard: int
    """How many of the numbered notifications (`TellResult`, `TellComplete`) it had heard by then."""
    finished: bool
    """Whether there is no further proposal, ever."""


@dataclass(frozen=True, slots=True)
class TrialAdded:
    """Somebody outside has added a trial."""

    trial: Trial


@dataclass(frozen=True, slots=True)
class SearchSaved:
    """The search algorithm's state after it heard so many notifications; bounds what a resume tells it again."""

    search_state: dict[str, Any]
    heard: int


@dataclass(frozen=True, slots=True)
class SearchIdle:
    """The search algorithm was asked, has heard so many notifications, and has nothing to propose until it hears more.

    Journalled only where nothing else can run: a scheduler may have kept trials waiting for its proposals.
    """

    heard: int


@dataclass(frozen=True, slots=True)
class ResourcesFree:
    """There is room for one trial at most, whose needs are named."""

    needs: tuple[str, ...]
    """Keys as of `needs_of`."""


@dataclass(frozen=True)
class ResultReceived(executor.Event):
    """`executor.Reported`, with the stopper's answer."""

    result: Result
    stop: bool | None
    """None if the stopper was not asked: the result does not count."""


@dataclass(frozen=True)
class ResultRefused(executor.Event):
    """A trial that rests has reported what is no result; that is a failure of it."""

    reason: str


@dataclass(frozen=True)
class ResetRefused(executor.Event):
    """`change` returned False."""


@dataclass(frozen=True, slots=True)
class CannotRun:
    """A PENDING trial needs what will never be free."""

    trial_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class TrialStopRequested:
    """Somebody outside asks for a trial's end."""

    trial_id: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Every trial ends now and none starts any more: a stopper or the time budget."""

    reason: str


@dataclass(frozen=True, slots=True)
class Opened:
    """A runner has taken the experiment over, as the first or after another: nothing of what was started runs any more."""

    errored: bool = False
    """Whether trials in ERROR run again."""


Event = (
    TrialsProposed
    | TrialAdded
    | SearchSaved
    | SearchIdle
    | ResourcesFree
    | ResultReceived
    | ResultRefused
    | ResetRefused
    | CannotRun
    | TrialStopRequested
    | StopRequested
    | Opened
    | executor.Started
    | executor.Saved
    | executor.SaveFailed
    | executor.Completed
    | executor.Failed
    | executor.Stopped
)

# --- instructions ---


@dataclass(frozen=True, slots=True)
class AskSearch:
    """Ask the search algorithm for at most so many trials. One is outstanding at a time."""

    count: int


@dataclass(frozen=True, slots=True)
class TellResult:
    """Tell the search algorithm a result; the notifications are numbered from 1."""

    number: int
    trial_id: str
    result: Result


@dataclass(frozen=True, slots=True)
class TellComplete:
    """Tell the search algorithm that a trial has ended."""

    number: int
    trial_id: str
    result: Result | None
    error: bool


@dataclass(frozen=True, slots=True)
class AskExecutor:
    """Call a method of `EventExecutor` about a trial. `ResetRefused` follows a `change` that returns False."""

    method: Literal["begin", "proceed", "save_to", "change", "suspend", "end", "end_paused"]
    trial: Trial
    arguments: tuple[Any, ...] = ()
    """What the method takes after the trial."""


@dataclass(frozen=True, slots=True)
class DeleteCheckpoint:
    """Nobody needs it any more."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class WriteError:
    """Append to the trial's `error.txt`."""

    trial: Trial
    text: str
    number: int
    """Which failure of the trial it is, from 1."""


@dataclass(frozen=True, slots=True)
class Notify:
    """Call a method of the callbacks about a trial."""

    method: str
    trial: Trial
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Warn:
    """Has a warning logged."""

    text: str


Instruction = AskSearch | TellResult | TellComplete | AskExecutor | DeleteCheckpoint | WriteError | Notify | Warn


def needs_of(trial: Trial) -> str:
    """The key of what a trial needs: trials with equal needs have equal keys."""
    return ",".join(f"{name}={amount:g}" for name, amount in sorted(trial.resources.totals().items()))
