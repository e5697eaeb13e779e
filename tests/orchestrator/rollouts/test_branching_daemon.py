"""A whole run says in its log what it costs that an environment starts every turn anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from counterpoint.environments.base import Example, Model
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.orchestrator.daemon import run
from counterpoint.orchestrator.rollouts.branching import FACTOR, SAMPLES
from counterpoint.run.config import RunConfig
from counterpoint.transport.records import Rollout
from tests.orchestrator.daemons import metrics_of
from tests.orchestrator.scripted_trainer import ScriptedTrainer

pytestmark = pytest.mark.slow

TURNS, STEPS = 6, 3


class Forgetful:
    """Renders its whole history in every turn, without what the policy said."""

    group_scoring = False

    def __len__(self) -> int:
        return 50

    def example(self, index: int) -> Example:
        return Example(index, f"example {index}")

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        messages = [{"role": "user", "content": example.prompt}]
        for _ in range(TURNS):
            await model.generate(model.chat.start(messages))
            messages += [{"role": "assistant", "content": "cut"}, {"role": "user", "content": "go on"}]

    async def score(self, example: Example, rollout: Rollout) -> float:
        return float(int(rollout.rollout_id.rpartition("-")[2]) % 2)


def test_the_log_says_once_what_it_costs(make_config: Callable[..., RunConfig]) -> None:
    environments = [EnvironmentConfig(name="forgetful", kind=f"{__name__}:Forgetful")]
    config = make_config(steps=STEPS, environments=environments, filters=[])
    with ScriptedTrainer(config.output_dir, "one", STEPS):
        assert run(config, lambda: None) == 0
    lines = metrics_of(config)
    assert {line[SAMPLES] for line in lines} == {TURNS}
    assert all(line[FACTOR] > 2 for line in lines)
    said = (config.run_dir / "orchestrator.log").read_text()
    assert said.count(f"a rollout is trained as {TURNS:.1f} samples") == 1
