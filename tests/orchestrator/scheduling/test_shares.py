"""Ratios are of what is trained: groups that are too old are made up for, and no environment starves because of another one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from counterpoint.run.config import ScheduleConfig
from tests.orchestrator.scheduling.simulation import Example, Simulation

STEPS = 60
TRAINING = 3
"""Moments for which a step is trained."""


def played(durations: dict[str, tuple[int, int]]) -> Simulation:
    """Plays a run; `durations` has the shortest and the longest moments of an environment's groups, which take turns."""
    started: Counter[str] = Counter()

    def duration(_chance: object, environment: str, _example: int) -> int:
        shortest, longest = durations[environment]
        started[environment] += 1
        return shortest + started[environment] * 7 % (longest - shortest + 1)

    schedule = ScheduleConfig(
        group_size=1,
        rollouts_per_step=8,
        max_inflight_rollouts=64,
        max_lead_steps=3,
        max_off_policy_steps=4,
        stragglers="drop",
    )
    return Simulation(schedule, STEPS, duration, [*durations], examples=50, training=TRAINING).run()


def by_environment(examples: list[Example]) -> Counter[str]:
    return Counter(environment for environment, _ in examples)


def test_an_environment_of_which_some_groups_are_too_old_is_trained_as_much_as_its_ratio_says() -> None:
    """Without that, 328 groups of the fast one were trained here and 152 of the slow one."""
    run = played({"fast": (1, 1), "slow": (10, 60)})
    assert by_environment(run.stale)["slow"] > 100
    assert by_environment(run.trained)["slow"] / len(run.trained) == pytest.approx(0.5, abs=0.03)


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
    run = played({"fast": fast, "slow": slow})
    assert run.scheduler.snapshot().next_step == STEPS + 1
    for name in run.environments:
        assert run.started[name] >= run.started.total() / 4 - 2
    trained = by_environment(run.trained)
    assert trained["fast"] >= trained["slow"] / 2
