"""Stands in for the policy: answers from a script, with real tokens and real chat rendering."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from environments.base import Environment
from environments.chat import Chat
from transport.records import Rollout, Turn


def make_turn(prompt_ids: Sequence[int], completion_ids: Sequence[int], finish_reason: str = "stop") -> Turn:
    return Turn(
        prompt_ids=np.asarray(prompt_ids, np.int32),
        completion_ids=np.asarray(completion_ids, np.int32),
        log_probabilities=np.zeros(len(completion_ids), np.float32),
        policy_version=0,
        finish_reason=finish_reason,
    )


class ScriptedModel:
    """`environments.base.Model` that says one answer a turn, each with its end of turn."""

    def __init__(self, chat: Chat, answers: Iterable[str]) -> None:
        self.chat = chat
        self._answers = iter(answers)
        self.turns: list[Turn] = []

    async def generate(self, prompt_ids: Sequence[int]) -> Turn:
        completion = [*self.chat.encode(next(self._answers)), self.chat.stop_token_ids[0]]
        self.turns.append(make_turn(prompt_ids, completion))
        return self.turns[-1]


async def play(environment: Environment, index: int, chat: Chat, *answers: str) -> Rollout:
    """One finished rollout of the example at `index`, scored unless its group is."""
    model = ScriptedModel(chat, answers)
    state: dict[str, Any] = {}
    example = environment.example(index)
    await environment.rollout(example, model, state)
    rollout = Rollout(f"0-{index}", 0, "under-test", index, model.turns, state=state)
    if not environment.group_scoring:
        rollout.reward = await environment.score(example, rollout)
    return rollout
