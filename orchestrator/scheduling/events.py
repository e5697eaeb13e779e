"""The vocabulary of the scheduler: the events it is told and the instructions it gives.

Everything is frozen and small. The scheduler (`scheduler.py`) is pure: `handle(event) -> list[Instruction]`. The dispatcher
(`dispatcher.py`) executes instructions and reports back with events.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.scheduling.outcomes import DropReason, RolloutOutcome

# --- events: what happened ---


@dataclass(frozen=True, slots=True)
class PolicyUpdated:
    """Inference now serves policy version `version`. The first one starts the scheduling."""

    version: int


@dataclass(frozen=True, slots=True)
class PolicyUpdateStarting:
    """Version `version` is about to be loaded: groups it would make too stale must go first."""

    version: int


@dataclass(frozen=True, slots=True)
class RolloutEnded:
    """A rollout finished all its turns and was scored, or failed, or was cancelled as instructed."""

    group_id: int
    rollout_id: str
    outcome: RolloutOutcome
    oldest_policy_version: int | None
    """Of its turns; None when it has none."""


@dataclass(frozen=True, slots=True)
class GroupFinalized:
    """Advantages and filters are done with a group: `kept` rollouts train, `filtered` do not."""

    group_id: int
    kept: int
    filtered: int
    dropped: DropReason | None = None
    """Why the whole group was dropped: `FAILED`, `INFERENCE_FAILED`, `INCOMPLETE` or `ADVANTAGE`; None where it was not."""
    detail: str = ""
    """Of `dropped`, for a person."""


@dataclass(frozen=True, slots=True)
class BatchCommitted:
    """The batch of `step` is a durable record, its groups are spent."""

    step: int


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    """At most `rollouts` may be in flight from now on (servers came or went)."""

    rollouts: int


@dataclass(frozen=True, slots=True)
class GroupsBegun:
    """All groups that were to start before `MoreToStart` have begun."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Start nothing more (shutdown). What is in flight is cancelled by the dispatcher."""


Event = (
    PolicyUpdated
    | PolicyUpdateStarting
    | RolloutEnded
    | GroupFinalized
    | BatchCommitted
    | CapacityChanged
    | GroupsBegun
    | DrainRequested
)

# --- instructions: what to do about it ---


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Start `size` rollouts of one example; their ids are `f"{group_id}-{index}"`."""

    group_id: int
    environment: str
    example_index: int
    size: int


@dataclass(frozen=True, slots=True)
class MoreToStart:
    """More groups may start than one event starts: report `GroupsBegun` once those named so far have begun."""


@dataclass(frozen=True, slots=True)
class CancelGroup:
    """Cancel what is still in flight of a group and forget it; each cancelled rollout still reports `RolloutEnded`."""

    group_id: int
    reason: DropReason
    detail: str
    """For a person."""


@dataclass(frozen=True, slots=True)
class FinalizeGroup:
    """All rollouts of the group have ended: score the group if it is scored as one, compute advantages, apply filters,
    then report `GroupFinalized`."""

    group_id: int


@dataclass(frozen=True, slots=True)
class ShipBatch:
    """Merge, record, checkpoint and send the kept rollouts of these groups, in this order, as the batch of `step`; then report
    `BatchCommitted`."""

    step: int
    group_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The last step has been committed: nothing more will be asked."""


Instruction = StartGroup | MoreToStart | CancelGroup | FinalizeGroup | ShipBatch | Finish
