"""The agent with two tools of `examples/tools`: a right call is paid at its turn, once, and trained by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.environments.base import EnvironmentContext
from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.lifecycle import started
from counterpoint.environments.scripted import play
from counterpoint.environments.tools.hermes import write_hermes
from counterpoint.environments.workers.load import load_environment
from counterpoint.models.tiny_tokenizer import write_tokenizer
from counterpoint.orchestrator.rollouts.trajectories import merge_rollout
from counterpoint.orchestrator.step.advantages import load_advantage
from counterpoint.orchestrator.step.players import set_advantages
from counterpoint.run.config import AdvantageConfig

FIND, PRICE = write_hermes("find", {"thing": "rice"}), write_hermes("price", {"shelf": 2})
ASTRAY = write_hermes("price", {"shelf": 4})


@pytest.mark.slow
async def test_a_right_call_is_paid_at_its_turn_once_and_trained_by_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, longest=1024)
    chat = Chat(tmp_path)
    environment = load_environment(EnvironmentConfig(name="shop", kind="examples.tools.shop:Shop"))
    async with started(environment, EnvironmentContext("shop", tmp_path, tmp_path, 0)):
        group = [
            await play(environment, 1, chat, *answers)
            for answers in ((FIND, PRICE, "3"), (FIND, FIND, "3"), (ASTRAY, PRICE, "5"))
        ]
    rewards = [rollout.turn_rewards.tolist() for rollout in group if rollout.turn_rewards is not None]
    assert rewards == [[0.25, 0.25, 0.5], [0.25, 0.0, 0.5], [0.0, 0.25, 0.0]]
    assert [rollout.reward for rollout in group] == [1.0, 0.75, 0.25]
    set_advantages(load_advantage(AdvantageConfig(kind="turn_returns")), group)
    found = [rollout.turn_advantages.tolist() for rollout in group if rollout.turn_advantages is not None]
    assert found == [[0.5, 0.375, 0.25], [0.125, 0.0, 0.25], [-0.625, -0.375, -0.5]]
    for rollout, own in zip(group, found, strict=True):
        (sample,) = merge_rollout(rollout)
        trained = sample.advantages_T[sample.loss_mask_T == 1].tolist()
        lengths = [len(turn.completion_ids) for turn in rollout.turns]
        assert trained == [value for value, length in zip(own, lengths, strict=True) for _ in range(length)]
