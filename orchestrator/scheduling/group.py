"""The scheduler's record of a group, its saved form, and the snapshot of the scheduler.

The rules are in `scheduler.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["waiting", "running", "finalizing", "ready"]


@dataclass(slots=True)
class Group:
    """A group of rollouts, reduced to the fields of the scheduler's rules."""

    group_id: int
    environment: str
    example_index: int
    phase: Phase = "waiting"
    started_version: int = 0
    """The newest loaded policy version when it started. None of its turns is older."""
    outstanding: int = 0
    """Its rollouts in flight."""
    completed: int = 0
    failed: int = 0
    interrupted: bool = False
    """The drain cancelled a rollout of it, so the group must start again."""
    oldest_version: int | None = None
    """The oldest policy version of its completed rollouts' turns so far."""
    kept: int = 0
    filtered: int = 0
    rewards: tuple[float, ...] = ()
    """The rewards of a finalized group."""
    _example: dict[str, Any] = field(init=False, repr=False, compare=False)
    """The saved form of a group that is not ready, made once: each step saves thousands of groups."""

    def __post_init__(self) -> None:
        self._example = {
            "group_id": self.group_id,
            "environment": self.environment,
            "example_index": self.example_index,
        }

    @property
    def version(self) -> int:
        """The policy version for its staleness: a lower bound while it runs, then that of its oldest turn."""
        if self.phase == "ready" and self.oldest_version is not None:
            return self.oldest_version
        return self.started_version

    def saved(self, ready: bool) -> dict[str, Any]:
        """Returns its saved form, for msgpack: the example and, with `ready`, the numbers of a ready group. Do not change it."""
        if not ready or self.phase != "ready":
            return self._example
        numbers = {"kept": self.kept, "filtered": self.filtered, "version": self.version, "rewards": list(self.rewards)}
        return {**self._example, "ready": numbers}


def restored(entry: dict[str, Any]) -> Group:
    """Restores the group from its saved form: ready if it was, else waiting to start again.

    Raises `KeyError`, `TypeError`, `ValueError`.
    """
    group = Group(int(entry["group_id"]), str(entry["environment"]), int(entry["example_index"]))
    if "ready" in entry:
        ready = entry["ready"]
        group.phase = "ready"
        group.kept, group.filtered = int(ready["kept"]), int(ready["filtered"])
        group.oldest_version = int(ready["version"])
        group.rewards = tuple(map(float, ready.get("rewards", ())))
    return group


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """The scheduler's numbers and reasons to wait, for the watchdog, the metrics and people."""

    policy_version: int | None
    next_step: int
    in_flight_rollouts: int
    """The rollouts of groups in flight."""
    evaluation_rollouts: int
    """Evaluation rollouts in flight."""
    capacity: int
    groups: dict[Phase, int]
    """Number of groups by phase."""
    staleness_bound: int
    """`max_off_policy_steps`, or the present value of `"auto"`."""
    paused: bool
    waiting_for: tuple[str, ...]
    """Sentences, which stay the same until something changes."""
