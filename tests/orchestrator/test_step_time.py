"""The whole daemon takes the step time and the staleness that `plan` predicts from the seconds of rollouts and trainer.

With a trainer that took 1 s, steps were 0.4 to 5 % longer than predicted, and as old, on a quiet machine.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from counterpoint.environments.base import Example, Model
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.job.plan.speed import mean_staleness, step_seconds
from counterpoint.orchestrator.daemon import run
from counterpoint.run.config import RunConfig, ScheduleConfig
from counterpoint.transport.records import Rollout
from tests.orchestrator.daemons import metrics_of
from tests.orchestrator.scripted_trainer import ScriptedTrainer

pytestmark = pytest.mark.slow

RUN_STEPS, FIRST_STEPS, ROLLOUTS = 16, 6, 32

TRAIN_SECONDS = 0.4


class Equal:
    """Every rollout takes as long."""

    group_scoring = False

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 500

    def example(self, index: int) -> Example:
        return Example(index, f"example {index}")

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        await model.generate(model.chat.start([{"role": "user", "content": example.prompt}]))
        await asyncio.sleep(self._seconds)

    async def score(self, example: Example, rollout: Rollout) -> float:
        return float(example.index % 10 == 0)


@pytest.mark.parametrize(("steps_long", "lead", "in_flight"), [(0.5, 1, 64), (3.0, 2, 64), (3.0, 4, 128), (2.0, 2, 32)])
def test_a_step_takes_as_long_and_is_as_old_as_predicted(
    make_config: Callable[..., RunConfig], steps_long: float, lead: int, in_flight: int
) -> None:
    seconds = steps_long * TRAIN_SECONDS
    config = make_config(
        steps=RUN_STEPS,
        environments=[EnvironmentConfig(name="equal", kind=f"{__name__}:Equal", args={"seconds": seconds})],
        schedule=ScheduleConfig(
            group_size=4,
            rollouts_per_step=ROLLOUTS,
            max_inflight_rollouts=in_flight,
            max_lead_steps=lead,
            max_off_policy_steps=32,
        ),
        filters=[],
    )
    with ScriptedTrainer(config.output_dir, "one", RUN_STEPS, durable_every=50, train_seconds=TRAIN_SECONDS):
        assert run(config, lambda: None) == 0
    lines = metrics_of(config)[FIRST_STEPS:]
    at_once = min(in_flight, lead * ROLLOUTS)
    servers = ROLLOUTS * seconds / at_once
    predicted = step_seconds(TRAIN_SECONDS, servers, seconds, lead)
    walls = [line["wall_seconds"] for line in lines]
    # A busy machine makes steps longer, by any factor, and servers slower, so that the lead is not used in full.
    assert statistics.fmean(walls) > 0.9 * predicted
    staleness = mean_staleness(TRAIN_SECONDS, servers, predicted, at_once / ROLLOUTS, lead)
    assert 0.6 * staleness < statistics.fmean(line["staleness/mean"] for line in lines) < 1.1 * staleness
