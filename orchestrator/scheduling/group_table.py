"""The scheduler's groups, and what its rules ask of all of them: their number, the oldest, the rollouts to expect.

The answers are kept up to date as each group moves from phase to phase, so that an event costs O(log n) with n groups.
The phases and the rules are in `scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import get_args

from orchestrator.scheduling.group import Group, Phase
from run.config import ScheduleConfig


class GroupTable:
    """Groups by id. A group enters each phase at most once."""

    def __init__(self, schedule: ScheduleConfig, groups: Iterable[Group] = ()) -> None:
        self._schedule = schedule
        self._groups: dict[int, Group] = {}
        self._phases: dict[Phase, _OldestFirst] = {phase: _OldestFirst() for phase in get_args(Phase)}
        self.expected = 0
        """Rollouts that the groups under way will count for, if nothing else fails."""
        self.ready_rollouts = 0
        """Rollouts of ready groups that count towards a batch."""
        for group in groups:
            self.add(group)

    def __iter__(self) -> Iterator[Group]:
        """In the order in which they were added."""
        return iter(self._groups.values())

    def get(self, group_id: int) -> Group | None:
        """The group; None where it was removed or never added."""
        return self._groups.get(group_id)

    def add(self, group: Group) -> None:
        """Adds a group, in the phase that it says."""
        self._groups[group.group_id] = group
        self._enter(group)

    def remove(self, group: Group) -> None:
        """Forgets a group."""
        del self._groups[group.group_id]
        self._leave(group)

    def move(self, group: Group, phase: Phase) -> None:
        """Takes a group to `phase`. Its version there must not change any more."""
        self._leave(group)
        group.phase = phase
        self._enter(group)

    def rollout_failed(self, group: Group) -> None:
        """Expects one rollout less of a running group."""
        group.failed += 1
        self.expected -= 1

    def counts(self, group: Group) -> int:
        """Rollouts of a finalized group that count towards a batch."""
        return group.kept + (group.filtered if self._schedule.on_filtered == "ship" else 0)

    def sizes(self) -> dict[Phase, int]:
        """How many groups are in each phase that has any."""
        return {phase: len(groups) for phase, groups in self._phases.items() if len(groups)}

    def oldest(self, phase: Phase) -> Group | None:
        """The group of `phase` with the oldest version, the first id among equals; None where there is none."""
        return self._phases[phase].first()

    def ready(self) -> list[Group]:
        """All that are ready, the oldest first."""
        return self._phases["ready"].sorted()

    def _enter(self, group: Group) -> None:
        self._phases[group.phase].add(group)
        self._count(group, 1)

    def _leave(self, group: Group) -> None:
        self._phases[group.phase].remove(group)
        self._count(group, -1)

    def _count(self, group: Group, sign: int) -> None:
        if group.phase == "ready":
            self.ready_rollouts += sign * self.counts(group)
            self.expected += sign * self.counts(group)
        elif group.phase != "waiting":
            self.expected += sign * (self._schedule.group_size - group.failed)


class _OldestFirst:
    """Groups by version, then id. What was removed stays in the heap until it comes first, or until it is half of the heap."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._heap: list[tuple[int, int]] = []
        """Version and id."""

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: Group) -> None:
        """Adds a group whose version stays as it is."""
        self._groups[group.group_id] = group
        heappush(self._heap, (group.version, group.group_id))

    def remove(self, group: Group) -> None:
        """Removes a group; O(1) on average."""
        del self._groups[group.group_id]
        if len(self._heap) > 2 * len(self._groups):
            self._heap = [(each.version, each.group_id) for each in self._groups.values()]
            heapify(self._heap)

    def first(self) -> Group | None:
        """The one of the oldest version."""
        while self._heap and self._heap[0][1] not in self._groups:
            heappop(self._heap)
        return self._groups[self._heap[0][1]] if self._heap else None

    def sorted(self) -> list[Group]:
        """All of them, in order."""
        return sorted(self._groups.values(), key=lambda group: (group.version, group.group_id))
