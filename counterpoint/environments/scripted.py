"""Stands in for the policy in tests of an environment: answers from a script, with real tokens and the real chat template.

    rollout = asyncio.run(play(MyEnvironment(), 0, chat, "my first answer", "my second"))
    assert rollout.reward == 1.0

No server is needed. `chat` is `Chat(DIRECTORY)` of a model's directory, of which only tokenizer and chat template are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from counterpoint.environments.base import Environment, Model, OnePolicy, Reply
from counterpoint.environments.chat import Chat, Tool
from counterpoint.environments.reward import TurnRewards, as_rewards
from counterpoint.environments.sampling import CallOverrides, SamplingConfig, SamplingOverrides
from counterpoint.environments.tools.hermes import parse_hermes
from counterpoint.transport.records import Rollout, Turn

LOG_PROBABILITY = -0.5
"""The log-probability of every token."""


class ScriptedModel(OnePolicy):
    """`environments.base.Model` that says one answer a turn, each with its end of turn. Its players share the script."""

    def __init__(self, chat: Chat, answers: Iterable[str]) -> None:
        self.chat = chat
        self._answers = iter(answers)
        self._ids = itertools.count(1)
        self.turns: list[Turn] = []
        """The turns so far, in order."""
        self.turn_rewards = TurnRewards(self.turns)
        self.sampling = SamplingConfig()

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        """Returns the next answer as a turn. Raises `AssertionError` when there is none."""
        turn = self._next("", prompt_ids)
        if isinstance(sampling, CallOverrides) and sampling.json_schema:
            turn.leave_untrained()
        return turn

    def reward(self, value: float, turn: int | Turn | None = None) -> None:
        """See `environments.base.Model`."""
        self.turn_rewards.give(value, turn)

    def player(self, name: str) -> Model:
        """See `environments.base.Model`."""
        return _Player(self, name)

    def _next(self, player: str, prompt_ids: Sequence[int]) -> Turn:
        answer = next(self._answers, None)
        assert answer is not None, f"the environment asked for answer {len(self.turns) + 1}; the script has fewer"
        completion = [*self.chat.encode(answer), self.chat.stop_token_ids[0]]
        turn = Turn(
            prompt_ids=np.asarray(prompt_ids, np.int32),
            completion_ids=np.asarray(completion, np.int32),
            log_probabilities=np.full(len(completion), LOG_PROBABILITY, np.float32),
            policy_version=0,
            finish_reason="stop",
            player=player,
        )
        self.turns.append(turn)
        return turn

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        """See `environments.base.Model`. Calls of tools are in the format of `environments.tools.hermes`."""
        text = self.chat.decode(turn.completion_ids.tolist())
        return parse_hermes(text, tools, lambda: f"call_{next(self._ids)}") if tools else Reply(text)


class _Player(ScriptedModel):
    def __init__(self, model: ScriptedModel, name: str) -> None:
        self.chat, self.sampling, self.turns = model.chat, model.sampling, model.turns
        self._model, self._name = model, name

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        return self._model._next(self._name, prompt_ids)

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        return await self._model.parse(turn, tools, reasoning=reasoning)

    def reward(self, value: float, turn: int | Turn | None = None) -> None:
        self._model.turn_rewards.give(value, turn, self._name)

    def player(self, name: str) -> Model:
        return self._model.player(name)


async def play(environment: Environment, index: int, chat: Chat, *answers: str) -> Rollout:
    """Returns the finished rollout of the example at `index`, scored unless its group is."""
    model = ScriptedModel(chat, answers)
    state: dict[str, Any] = {}
    example = environment.example(index)
    await environment.rollout(example, model, state)
    rollout = Rollout(f"0-{index}", 0, "under-test", index, model.turns, state=state)
    rollout.turn_rewards = model.turn_rewards.array()
    if not environment.group_scoring:
        score = await environment.score(example, rollout)
        rewards = as_rewards(score, environment.score, rollout)
        rollout.reward, rollout.player_rewards, rollout.turn_rewards = rewards
    return rollout
