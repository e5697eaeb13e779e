"""The scheduler's groups, with aggregates for its rules: their number, the oldest, the rollouts to expect.

A group that moves from phase to phase updates the aggregates, so that an event costs O(log n) with n groups. The phases and the
rules are in `scheduler.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import get_args

from counterpoint.orchestrator.scheduling.group import Group, Phase
from counterpoint.run.config import ScheduleConfig


class GroupTable:
    """Groups by id. A group enters each phase at most once."""

    def __init__(self, schedule: ScheduleConfig, groups: Iterable[Group] = ()) -> None:
        self._schedule = schedule
        self._groups: dict[int, Group] = {}
        self._phases: dict[Phase, _OldestFirst] = {phase: _OldestFirst() for phase in get_args(Phase)}
        self.expected = 0
        """Rollouts that running, finalizing and ready groups will contribute to batches if no further one fails."""
        self.ready_rollouts = 0
        """Rollouts of ready groups that count towards a batch."""
        self._under_way: Counter[int] = Counter()
        """Rollouts to expect of running and finalizing groups, by version, without zeros."""
        self._ready: Counter[int] = Counter()
        """`ready_rollouts` by version, without zeros."""
        for group in groups:
            self.add(group)

    def __iter__(self) -> Iterator[Group]:
        """Iterates in the order of addition."""
        return iter(self._groups.values())

    def get(self, group_id: int) -> Group | None:
        """Returns the group, or None if it was removed or never added."""
        return self._groups.get(group_id)

    def add(self, group: Group) -> None:
        """Adds a group in its phase."""
        self._groups[group.group_id] = group
        self._enter(group)

    def remove(self, group: Group) -> None:
        """Removes a group."""
        del self._groups[group.group_id]
        self._leave(group)

    def move(self, group: Group, phase: Phase) -> None:
        """Moves a group to `phase`. Its version must not change while it is there."""
        self._leave(group)
        group.phase = phase
        self._enter(group)

    def rollout_failed(self, group: Group) -> None:
        """Counts a failed rollout of a running group."""
        self._count(group, -1)
        group.failed += 1
        self._count(group, 1)

    def counts(self, group: Group) -> int:
        """Returns the number of a finalized group's rollouts that count towards a batch."""
        return group.kept + (group.filtered if self._schedule.on_filtered == "ship" else 0)

    def sizes(self) -> dict[Phase, int]:
        """Returns the number of groups of each phase that has any."""
        return {phase: len(groups) for phase, groups in self._phases.items() if len(groups)}

    def oldest(self, phase: Phase) -> Group | None:
        """Returns the group of `phase` with the oldest version, then the lowest id, or None."""
        return self._phases[phase].first()

    def straggling(self, step: int) -> int | None:
        """Returns the version up to which the batch of `step` must wait for groups, or None if it may ship without any.

        It must wait if the groups up to a version that it would leave are more than the batches after it can take in time.
        """
        size, under_way, ready = self._schedule.rollouts_per_step, 0, 0
        for version in sorted(self._under_way | self._ready):
            later_steps = version + self._schedule.staleness_limit - step
            if later_steps < 0:
                continue  # It is too late for these.
            under_way += self._under_way[version]
            ready += self._ready[version]
            if under_way and under_way + max(0, ready - size) > later_steps * size:
                return version
        return None

    def ready(self) -> list[Group]:
        """Returns the ready groups, the oldest first."""
        return self._phases["ready"].sorted()

    def _enter(self, group: Group) -> None:
        self._phases[group.phase].add(group)
        self._count(group, 1)

    def _leave(self, group: Group) -> None:
        self._phases[group.phase].remove(group)
        self._count(group, -1)

    def _count(self, group: Group, sign: int) -> None:
        if group.phase == "waiting":
            return
        if group.phase == "ready":
            change, versions = sign * self.counts(group), self._ready
            self.ready_rollouts += change
        else:
            change, versions = sign * (self._schedule.group_size - group.failed), self._under_way
        self.expected += change
        versions[group.version] += change
        if not versions[group.version]:
            del versions[group.version]


class _OldestFirst:
    """Groups by version, then id. Removed ones stay in the heap until they come first, or are half of the heap."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._heap: list[tuple[int, int]] = []
        """Version and id of each group."""

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: Group) -> None:
        """Adds a group. Its version must not change any more."""
        self._groups[group.group_id] = group
        heappush(self._heap, (group.version, group.group_id))

    def remove(self, group: Group) -> None:
        """Removes a group, O(1) on average."""
        del self._groups[group.group_id]
        if len(self._heap) > 2 * len(self._groups):
            self._heap = [(each.version, each.group_id) for each in self._groups.values()]
            heapify(self._heap)

    def first(self) -> Group | None:
        """Returns the group of the oldest version."""
        while self._heap and self._heap[0][1] not in self._groups:
            heappop(self._heap)
        return self._groups[self._heap[0][1]] if self._heap else None

    def sorted(self) -> list[Group]:
        """Returns all groups, in order."""
        return sorted(self._groups.values(), key=lambda group: (group.version, group.group_id))
