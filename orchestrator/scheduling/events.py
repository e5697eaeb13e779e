"""The vocabulary of the scheduler: the events that it handles and the instructions that it returns.

All are small and frozen. The scheduler (`scheduler.py`) is pure: `handle(event) -> list[Instruction]`. The dispatcher
(`dispatcher.py`) executes instructions and reports back with events.

Next in the reading order of `docs/architecture.md`: `orchestrator/scheduling/scheduler.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.orchestrator.scheduling.giving_up import Failure
from counterpoint.orchestrator.scheduling.outcomes import DropReason, RolloutOutcome

# --- events ---


@dataclass(frozen=True, slots=True)
class PolicyUpdated:
    """From now on inference answers with policy version `version`. The first one starts the scheduling."""

    version: int


@dataclass(frozen=True, slots=True)
class PolicyUpdateStarting:
    """Version `version` is about to be loaded. Groups that it would make too stale are cancelled first."""

    version: int


@dataclass(frozen=True, slots=True)
class RolloutEnded:
    """A rollout completed, failed, or was cancelled as instructed."""

    group_id: int
    rollout_id: str
    outcome: RolloutOutcome
    oldest_policy_version: int | None
    """The oldest policy version of its turns, or None without turns."""


@dataclass(frozen=True, slots=True)
class GroupFinalized:
    """Advantages and filters are done with a group: `kept` rollouts train, `filtered` do not."""

    group_id: int
    kept: int
    filtered: int
    dropped: DropReason | None = None
    """Why the whole group was dropped: `FAILED`, `INFERENCE_FAILED`, `INCOMPLETE` or `ADVANTAGE`. None if it was not."""
    detail: str = ""
    """Why the group was dropped, or why all its rollouts were filtered, for a person."""
    failure: Failure | None = None
    """Why every rollout of it failed, or it has no advantages, if that cannot pass by itself."""
    at: float = 0.0
    """The time of the event, in seconds of any clock that only rises."""
    rewards: tuple[float, ...] = ()
    """The rewards of the kept and filtered rollouts, for the curriculum. Empty if the group was dropped."""


@dataclass(frozen=True, slots=True)
class BatchCommitted:
    """The batch of `step` is committed."""

    step: int


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    """A server was added, lost or reconfigured: at most `rollouts` may be in flight from now on."""

    rollouts: int


@dataclass(frozen=True, slots=True)
class GroupsBegun:
    """All groups with a start instructed before `MoreToStart` have started."""


@dataclass(frozen=True, slots=True)
class PatienceEnded:
    """The batch of `step` has waited for stragglers as long as it may."""

    step: int


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Start nothing more (shutdown). The dispatcher cancels the rollouts in flight."""


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """Start nothing until `ResumeRequested`. Rollouts in flight go on, and batches ship."""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """A pause is over."""


@dataclass(frozen=True, slots=True)
class LimitChanged:
    """The configured limit, `ScheduleConfig.most_in_flight`, has changed. At least one group fits."""

    rollouts: int


@dataclass(frozen=True, slots=True)
class EvaluationRequested:
    """An evaluation of `rollouts` rollouts is to be played, within `share` of the capacity while training has work.

    One at a time: none is in progress.
    """

    evaluation_id: int
    rollouts: int
    share: float


@dataclass(frozen=True, slots=True)
class EvaluationRolloutEnded:
    """A rollout of an evaluation has ended, with any outcome."""

    evaluation_id: int
    index: int


Event = (
    PolicyUpdated
    | PolicyUpdateStarting
    | RolloutEnded
    | GroupFinalized
    | BatchCommitted
    | CapacityChanged
    | GroupsBegun
    | PatienceEnded
    | DrainRequested
    | PauseRequested
    | ResumeRequested
    | LimitChanged
    | EvaluationRequested
    | EvaluationRolloutEnded
)

# --- instructions ---


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Start `size` rollouts of one example, with the ids `f"{group_id}-{index}"`."""

    group_id: int
    environment: str
    example_index: int
    size: int


@dataclass(frozen=True, slots=True)
class MoreToStart:
    """More groups may start: report `GroupsBegun` once the groups instructed so far have started."""


@dataclass(frozen=True, slots=True)
class CancelGroup:
    """Cancel the group's rollouts in flight and forget it. Each cancelled rollout still reports `RolloutEnded`."""

    group_id: int
    reason: DropReason
    detail: str
    """The explanation, for a person."""


@dataclass(frozen=True, slots=True)
class FinalizeGroup:
    """Finalize a group after its last rollout's end: score it if it is scored as one, compute advantages, apply filters.

    Then report `GroupFinalized`.
    """

    group_id: int


@dataclass(frozen=True, slots=True)
class ShipBatch:
    """Merge, record, commit and send the kept rollouts of these groups, in this order, as the batch of `step`.

    Then report `BatchCommitted`.
    """

    step: int
    group_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AwaitStragglers:
    """The batch of `step` is full and waits for stragglers: report `PatienceEnded` if it has not shipped within the patience."""

    step: int


@dataclass(frozen=True, slots=True)
class BoundRaised:
    """Log that `max_off_policy_steps = "auto"` has become `steps`."""

    steps: int
    reason: str
    """The explanation, for a person."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the run: nothing can succeed (`giving_up.py`)."""

    reason: str
    """The explanation, for a person."""


@dataclass(frozen=True, slots=True)
class LastStepCommitted:
    """The last step is committed. Only evaluations follow."""


@dataclass(frozen=True, slots=True)
class StartEvaluationRollouts:
    """Start the evaluation's rollouts `first` to `first + count - 1`. Each reports `EvaluationRolloutEnded`."""

    evaluation_id: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class EndEvaluation:
    """All rollouts of the evaluation have ended: its results are due."""

    evaluation_id: int


@dataclass(frozen=True, slots=True)
class CancelEvaluation:
    """Cancel the evaluation's rollouts in flight (shutdown). Each still reports `EvaluationRolloutEnded`."""

    evaluation_id: int


EvaluationInstruction = StartEvaluationRollouts | EndEvaluation | CancelEvaluation

Instruction = (
    StartGroup
    | MoreToStart
    | CancelGroup
    | FinalizeGroup
    | ShipBatch
    | AwaitStragglers
    | BoundRaised
    | LastStepCommitted
    | GiveUp
    | EvaluationInstruction
)
