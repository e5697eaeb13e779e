"""An agent in a process of its own, with the stock `openai` client: every token that was sampled for it is trained once."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.gateway.agent import AgentEnvironment
from counterpoint.inference.base import SamplingParameters
from counterpoint.orchestrator.rollouts.play import LoadedEnvironment, PolicyModel, play
from counterpoint.orchestrator.rollouts.trajectories import merge_rollout
from counterpoint.transport.records import Int32Array, Rollout, Turn
from tests.support.rollouts import make_turn

AGENT = """
import asyncio, json, sys
import openai

async def converse(client, messages, turns):
    messages = list(messages)
    for _ in range(turns):
        answer = (await client.chat.completions.create(model="any", messages=messages)).choices[0].message
        messages += [answer, {"role": "user", "content": "more"}]
    return messages

async def main():
    async with openai.AsyncOpenAI() as client:
        begun = await converse(client, [{"role": "user", "content": json.load(sys.stdin)["prompt"]}], 2)
        # Two go on from the same history at once, one begins anew, and one has forgotten its middle.
        await asyncio.gather(
            converse(client, begun, 2),
            converse(client, begun, 3),
            converse(client, [{"role": "system", "content": "be brief"}, *begun[:1]], 2),
            converse(client, [begun[0], *begun[3:]], 1),
        )
        answer = await client.chat.completions.create(model="any", messages=begun, n=3)
        stream = await client.chat.completions.create(model="any", messages=begun, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        await client.completions.create(model="any", prompt="once")
    print(1.5)

asyncio.run(main())
"""
CALLS = 2 + 2 + 3 + 2 + 1 + 3 + 1 + 1


class RandomPool:
    """Completes every prompt with random tokens, many of which are no text, and remembers what it sampled."""

    def __init__(self, vocabulary: int, end: int) -> None:
        self.sampled: list[Turn] = []
        self._random = random.Random(4)
        self._vocabulary, self._end = vocabulary, end

    async def generate(
        self, prompt_ids: Int32Array, sampling: SamplingParameters, *, affinity: str, routed_experts_start: int = 0
    ) -> Turn:
        count = self._random.randint(1, 6)
        completion = [self._random.randrange(256) for _ in range(count)]
        if self._random.random() < 0.7:
            completion.append(self._end)
        values = [-self._random.random() for _ in completion]
        turn = make_turn(prompt_ids.tolist(), completion, start=routed_experts_start, log_probabilities=values)
        self.sampled.append(turn)
        return turn


@pytest.mark.slow
async def test_every_sampled_token_is_trained_once(chat: Chat, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(AGENT)
    environment = AgentEnvironment(command=[sys.executable, str(program)], data={"rows": [{"prompt": "begin"}]})
    pool, rollout = RandomPool(chat.vocabulary, chat.stop_token_ids[0]), Rollout("0-0", 0, "agent", 0)
    model = PolicyModel(
        rollout, chat, pool, SamplingParameters(temperature=1.0, max_tokens=8, stop_token_ids=chat.stop_token_ids)
    )
    config = EnvironmentConfig(name="agent", kind="agent", rollout_timeout_seconds=120.0, reward_bounds=(0, 2))
    await play(LoadedEnvironment(config, environment), rollout, model)
    await environment.close()
    assert rollout.error is None
    assert rollout.reward == 1.5
    assert len(pool.sampled) == len(rollout.turns) == CALLS
    samples = merge_rollout(rollout)
    trained = Counter[tuple[int, float]]()
    for sample in samples:
        assert len(sample.token_ids_T) == sum(len(chunk) for chunk in sample.routed_experts) + 1
        where = sample.loss_mask_T == 1
        trained.update(zip(sample.token_ids_T[where].tolist(), sample.log_probabilities_T[where].tolist(), strict=True))
    sampled = Counter[tuple[int, float]]()
    for turn in pool.sampled:
        values = turn.log_probabilities.astype(np.float32).tolist()
        sampled.update(zip(turn.completion_ids.tolist(), values, strict=True))
    assert trained == sampled
    # The first conversation and one that goes on from it; the other one, three that begin anew, three choices, a stream, a text.
    assert len(samples) < CALLS
