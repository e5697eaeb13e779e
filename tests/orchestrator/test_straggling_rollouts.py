"""The whole daemon trains slow rollouts as often as they are drawn, however old they get."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from scipy.stats import chisquare

from counterpoint.environments.base import Example, Model
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.orchestrator.daemon import run
from counterpoint.run.config import RunConfig, ScheduleConfig
from counterpoint.transport.records import Rollout
from tests.orchestrator.daemons import assert_whole, metrics_of, records_of
from tests.orchestrator.scripted_trainer import ScriptedTrainer

pytestmark = pytest.mark.slow

RUN_STEPS = 60

TRAIN_SECONDS, SLOW_SECONDS = 0.04, 1.0
"""So a slow rollout lasts at most 25 steps, and fewer where the machine makes them longer."""


class Uneven:
    """Every tenth example is slow, as with a slow tool."""

    group_scoring = False

    def __len__(self) -> int:
        return 50

    def example(self, index: int) -> Example:
        return Example(index, f"example {index}")

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        await model.generate(model.chat.start([{"role": "user", "content": example.prompt}]))
        if example.index % 10 == 0:
            await asyncio.sleep(SLOW_SECONDS)

    async def score(self, example: Example, rollout: Rollout) -> float:
        return float(example.index % 10 == 0)


SCHEDULES: dict[str, dict[str, Any]] = {
    "auto": {"max_off_policy_steps": "auto", "off_policy_limit": 64, "stragglers": "drop"},
    "wait": {"max_off_policy_steps": 2, "stragglers": "wait", "straggler_patience_steps": 1000},
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_slow_rollouts_are_trained_as_often_as_they_are_drawn(
    make_config: Callable[..., RunConfig], schedule: dict[str, Any]
) -> None:
    config = make_config(
        steps=RUN_STEPS,
        environments=[EnvironmentConfig(name="uneven", kind=f"{__name__}:Uneven")],
        schedule=ScheduleConfig(group_size=2, rollouts_per_step=8, max_inflight_rollouts=64, **schedule),
        filters=[],
    )
    with ScriptedTrainer(config.output_dir, "one", RUN_STEPS, durable_every=50, train_seconds=TRAIN_SECONDS):
        assert run(config, lambda: None) == 0
    assert_whole(config, RUN_STEPS)
    groups = {record["group_id"]: record["example_index"] for record in records_of(config)}
    assert len(groups) == 4 * RUN_STEPS
    assert max(groups) + 1 - len(groups) <= 64 // 2, "nothing is missing but what was in flight at the end"
    slow = sum(index % 10 == 0 for index in groups.values())
    assert chisquare([slow, len(groups) - slow], [0.1 * len(groups), 0.9 * len(groups)]).pvalue > 0.001
    lines = metrics_of(config)
    assert not any(name.startswith("stale/") for line in lines for name in line)
    assert all(line["staleness/max"] <= line["staleness/allowed"] for line in lines)
