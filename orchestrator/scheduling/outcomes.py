"""How a rollout ended, and why a group was dropped: the enums that events, instructions and reports carry."""

from __future__ import annotations

from enum import StrEnum


class RolloutOutcome(StrEnum):
    """How a rollout ended."""

    COMPLETED = "completed"
    """All its turns were played, and it has a reward unless its group is scored as one."""
    FAILED = "failed"
    """Its environment raised an exception or missed the deadline."""
    CANCELLED = "cancelled"
    """Its group was dropped, or the daemon drains."""


class DropReason(StrEnum):
    """Why no batch will take a group."""

    STALE = "stale"
    """Its oldest turn would exceed `max_off_policy_steps` in the next batch."""
    FAILED = "failed"
    """No rollout of it can be trained on."""
    INCOMPLETE = "incomplete"
    """It is scored as a group, and a rollout failed."""
    ADVANTAGE = "advantage"
    """The advantage function failed."""
    FILTERED = "filtered"
    """The filters kept none of its rollouts, or none of the whole batch that it was in."""
    RUN_DONE = "run done"
    """The last step was committed without it."""
