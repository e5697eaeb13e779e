"""The rollouts of an evaluation keep what its result and records need, and no more."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.sampling import SamplingConfig
from counterpoint.inference.base import SamplingParameters
from counterpoint.orchestrator.evaluation.attempt import EvaluationAttempt
from counterpoint.orchestrator.evaluation.loading import LoadedEvaluation, chosen_examples
from counterpoint.orchestrator.rollouts.play import LoadedEnvironment
from counterpoint.run.evaluations import EvaluationConfig
from counterpoint.transport.records import Int32Array, Turn
from tests.orchestrator.toy_environment import Toy


class RoutingPool:
    """Answers with views of one large array, as the client does."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def forget_group(self, affinity: str) -> None:
        self.forgotten.append(affinity)

    async def generate(
        self, prompt_ids: Int32Array, sampling: SamplingParameters, *, affinity: str, routed_experts_start: int = 0
    ) -> Turn:
        body = np.zeros(100_000, dtype=np.int32)
        rows = len(prompt_ids) + 2 - 1 - routed_experts_start
        return Turn(
            prompt_ids=prompt_ids,
            completion_ids=body[:2],
            log_probabilities=body[2:4].view(np.float32),
            policy_version=3,
            finish_reason="stop",
            routed_experts=np.zeros((rows, 2, 2), dtype=np.uint8),
            routed_experts_start=routed_experts_start,
        )


class Words:
    """Stands for the chat template."""

    def start(self, messages: Any, tools: Any = ()) -> list[int]:
        return [1, 2, 3]

    def decode(self, token_ids: list[int]) -> str:
        return "words"


@pytest.mark.parametrize("group_scoring", [False, True])
async def test_what_is_only_trained_on_is_dropped(group_scoring: bool) -> None:
    environment = EnvironmentConfig(name="toy", kind="tests.orchestrator.toy_environment:Toy")
    config = EvaluationConfig(name="e", environments=[environment], rollouts_per_example=2)
    sampling = SamplingParameters(temperature=1.0, max_tokens=2)
    loaded = LoadedEvaluation(
        config,
        {"toy": LoadedEnvironment(environment, Toy(turns=1, group_scoring=group_scoring))},
        {"toy": (cast(Chat, Words()), sampling)},
        {"toy": SamplingConfig()},
        [("toy", 1), ("toy", 2)],
    )
    pool, opponent = RoutingPool(), RoutingPool()
    attempt = EvaluationAttempt(loaded, 3, pool, {"other": opponent})
    for index in range(4):
        await attempt.play(index)
    assert pool.forgotten == opponent.forgotten == ["e-3-0-1", "e-3-1-1"], "once the last of a group has ended"
    for rollout in attempt.rollouts:
        assert rollout.error is None
        assert rollout.reward is not None
        (turn,) = rollout.turns
        assert (turn.routed_experts, rollout.branches) == (None, None)
        assert turn.completion_ids.base is None
        assert turn.log_probabilities.base is None
    result = await attempt.result()
    assert result.line["policy_version/min"] == result.line["policy_version/max"] == 3
    assert result.line["tokens/completion"] == 8


async def test_bounds_that_an_environment_has_later_do_not_end_an_evaluation() -> None:
    environment = EnvironmentConfig(name="toy", kind="tests.orchestrator.toy_environment:Toy")
    config = EvaluationConfig(name="e", environments=[environment])
    toy: Any = Toy(turns=1)
    loaded = LoadedEvaluation(
        config,
        {"toy": LoadedEnvironment(environment, toy)},
        {"toy": (cast(Chat, Words()), SamplingParameters(temperature=1.0, max_tokens=2))},
        {"toy": SamplingConfig()},
        [("toy", 1)],
    )
    attempt = EvaluationAttempt(loaded, 3, RoutingPool(), {})
    toy.reward_bounds = "none"
    await attempt.play(0)
    assert attempt.rollouts[0].error is None
    assert "reward/mean" in (await attempt.result()).estimates


def test_the_choice_of_examples_is_fixed_and_without_repetition() -> None:
    environment = EnvironmentConfig(name="toy", kind="reverse-text")
    config = EvaluationConfig(name="e", environments=[environment], examples=10)
    chosen = chosen_examples(config, "toy", 1000)
    assert len(set(chosen)) == 10
    assert chosen == sorted(chosen) == chosen_examples(config, "toy", 1000)
    assert chosen != list(range(10))
    assert chosen_examples(config, "toy", 7) == list(range(7))
    assert chosen_examples(config, "other", 1000) != chosen
