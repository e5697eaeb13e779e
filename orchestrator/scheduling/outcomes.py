"""How a rollout ended, and why a group was dropped: the enums of events, instructions and reports."""

from __future__ import annotations

from enum import StrEnum

from counterpoint.transport.records import Rollout


class RolloutOutcome(StrEnum):
    """How a rollout ended."""

    COMPLETED = "completed"
    """All its turns were played, and it has a reward unless its group is scored as one."""
    FAILED = "failed"
    """Its environment raised an exception or missed the deadline, or it cannot be trained on."""
    INFERENCE_FAILED = "inference_failed"
    """A model call of it got no answer in time, after all retries: no failure of its environment."""
    CANCELLED = "cancelled"
    """Its group was dropped, or the daemon drains."""


class DropReason(StrEnum):
    """Why no batch will take a group."""

    STALE = "stale"
    """Its oldest turn would exceed `ScheduleConfig.staleness_limit` in the next batch."""
    FAILED = "failed"
    """No rollout of it can be trained on."""
    INFERENCE_FAILED = "inference_failed"
    """The same as `FAILED` or `INCOMPLETE`, if every failed rollout failed because a model call got no answer."""
    INCOMPLETE = "incomplete"
    """It is scored as a group, and a rollout failed."""
    ADVANTAGE = "advantage"
    """The advantage function failed."""
    FILTERED = "filtered"
    """The filters kept none of its rollouts, or none of the whole batch that it was in."""
    RUN_DONE = "run done"
    """The last step was committed without it."""


def outcome_of(rollout: Rollout) -> RolloutOutcome:
    """The outcome of a rollout that was played to its end."""
    if rollout.error is None:
        return RolloutOutcome.COMPLETED
    return RolloutOutcome.INFERENCE_FAILED if rollout.inference_failed else RolloutOutcome.FAILED
