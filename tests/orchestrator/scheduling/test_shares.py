"""Ratios are of what is trained: groups that are too old are made up for, and no environment starves because of another one."""

from __future__ import annotations

import heapq
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.mix import ExampleMix
from counterpoint.orchestrator.scheduling.events import (
    BatchCommitted,
    CancelGroup,
    Event,
    FinalizeGroup,
    Finish,
    GroupFinalized,
    GroupsBegun,
    MoreToStart,
    PolicyUpdated,
    RolloutEnded,
    ShipBatch,
    StartGroup,
)
from counterpoint.orchestrator.scheduling.outcomes import DropReason, RolloutOutcome
from counterpoint.orchestrator.scheduling.scheduler import Scheduler
from counterpoint.run.config import ScheduleConfig

STEPS = 60
TRAINING = 3
"""Moments for which a step is trained."""


class World:
    """Servers and a trainer: a group of an environment takes so many moments, a step `TRAINING` of them."""

    def __init__(self, durations: dict[str, tuple[int, int]]) -> None:
        """`durations` has the shortest and the longest time of an environment's groups, which take turns."""
        self.durations = durations
        environments = [EnvironmentConfig(name=name, kind="reverse-text") for name in durations]
        schedule = ScheduleConfig(
            group_size=1, rollouts_per_step=8, max_inflight_rollouts=64, max_lead_steps=3, max_off_policy_steps=4
        )
        self.scheduler = Scheduler(schedule, STEPS, ExampleMix(environments, dict.fromkeys(durations, 50), 0))
        self.due: list[tuple[int, int, Event]] = []
        self.now = self.number = 0
        self.environments: dict[int, str] = {}
        self.started: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()
        self.stale: Counter[str] = Counter()

    def play(self) -> None:
        """The whole run."""
        self.after(0, PolicyUpdated(0))
        while self.due:
            self.now, _, event = heapq.heappop(self.due)
            for instruction in self.scheduler.handle(event):
                match instruction:
                    case StartGroup(group_id, environment):
                        self.environments[group_id] = environment
                        self.started[environment] += 1
                        shortest, longest = self.durations[environment]
                        played = shortest + self.started[environment] * 7 % (longest - shortest + 1)
                        self.after(played, RolloutEnded(group_id, f"{group_id}-0", RolloutOutcome.COMPLETED, None))
                    case FinalizeGroup(group_id):
                        self.after(0, GroupFinalized(group_id, kept=1, filtered=0))
                    case CancelGroup(group_id, reason):
                        self.stale[self.environments[group_id]] += reason is DropReason.STALE
                    case MoreToStart():
                        self.after(0, GroupsBegun())
                    case ShipBatch(step, group_ids):
                        self.trained.update(self.environments[group_id] for group_id in group_ids)
                        self.after(0, BatchCommitted(step))
                        self.after(TRAINING, PolicyUpdated(step))
                    case Finish():
                        self.due.clear()

    def after(self, moments: int, event: Event) -> None:
        """Due `moments` from now."""
        self.number += 1
        heapq.heappush(self.due, (self.now + moments, self.number, event))


def test_an_environment_of_which_some_groups_are_too_old_is_trained_as_much_as_its_ratio_says() -> None:
    """Without that, 328 groups of the fast one were trained here and 152 of the slow one."""
    world = World({"fast": (1, 1), "slow": (10, 60)})
    world.play()
    assert world.stale["slow"] > 100
    assert world.trained["slow"] / world.trained.total() == pytest.approx(0.5, abs=0.03)


@pytest.mark.slow
@settings(max_examples=50)
@example(fast=(1, 1), slow=(1000, 1000))
@given(
    fast=st.tuples(st.integers(1, 4), st.integers(4, 8)),
    slow=st.tuples(st.integers(1, 40), st.integers(40, 80)),
)
def test_groups_that_are_always_too_old_starve_no_other_environment(
    fast: tuple[int, int], slow: tuple[int, int]
) -> None:
    world = World({"fast": fast, "slow": slow})
    world.play()
    assert world.scheduler.snapshot().next_step == STEPS + 1
    for name in world.durations:
        assert world.started[name] >= world.started.total() / 4 - 2
    assert world.trained["fast"] >= world.trained["slow"] / 2
