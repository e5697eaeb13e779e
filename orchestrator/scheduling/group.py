"""What the scheduler knows of a group, how that is saved, and the snapshot that it shows to others.

The rules are in `scheduler.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["waiting", "running", "finalizing", "ready"]


@dataclass(slots=True)
class Group:
    """The rollouts of one example, as far as the scheduler's rules need to know them."""

    group_id: int
    environment: str
    example_index: int
    phase: Phase = "waiting"
    started_version: int = 0
    """The newest loaded policy version when it started: none of its turns is older."""
    outstanding: int = 0
    """Rollouts in flight."""
    completed: int = 0
    failed: int = 0
    interrupted: bool = False
    """A rollout was cancelled by the drain, so the group must start again."""
    oldest_version: int | None = None
    """Of the turns of its completed rollouts, so far."""
    kept: int = 0
    filtered: int = 0

    @property
    def version(self) -> int:
        """The policy version its staleness is reckoned from: a bound while it runs, then that of its oldest turn."""
        if self.phase == "ready" and self.oldest_version is not None:
            return self.oldest_version
        return self.started_version

    def saved(self, ready: bool) -> dict[str, Any]:
        """What a checkpoint keeps, msgpack-able: the example, and, if asked for, of a ready group what is needed to ship it."""
        entry: dict[str, Any] = {
            "group_id": self.group_id,
            "environment": self.environment,
            "example_index": self.example_index,
        }
        if ready and self.phase == "ready":
            entry["ready"] = {"kept": self.kept, "filtered": self.filtered, "version": self.version}
        return entry


def restored(entry: dict[str, Any]) -> Group:
    """The group that `saved` gave: ready if it was, else waiting to start again. Raises `KeyError`, `TypeError`, `ValueError`."""
    group = Group(int(entry["group_id"]), str(entry["environment"]), int(entry["example_index"]))
    if "ready" in entry:
        ready = entry["ready"]
        group.phase = "ready"
        group.kept, group.filtered = int(ready["kept"]), int(ready["filtered"])
        group.oldest_version = int(ready["version"])
    return group


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the scheduler holds and waits for, for the watchdog, the metrics and people."""

    policy_version: int | None
    next_step: int
    in_flight_rollouts: int
    capacity: int
    groups: dict[Phase, int]
    """Groups by phase."""
    waiting_for: tuple[str, ...]
    """Sentences; the same ones as long as nothing moves."""
