"""Stands in for the policy: answers from a script, with real tokens and real chat rendering."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from environments.base import Environment, Reply
from environments.chat import Chat, Tool
from environments.config import SamplingConfig, SamplingOverrides
from tests.support.rollouts import make_turn
from transport.records import Rollout, Turn


class ScriptedModel:
    """`environments.base.Model` that says one answer a turn, each with its end of turn."""

    def __init__(self, chat: Chat, answers: Iterable[str]) -> None:
        self.chat = chat
        self._answers = iter(answers)
        self.turns: list[Turn] = []
        self.sampling = SamplingConfig()

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        completion = [*self.chat.encode(next(self._answers)), self.chat.stop_token_ids[0]]
        self.turns.append(make_turn(prompt_ids, completion))
        return self.turns[-1]

    async def parse(self, turn: Turn, tools: Sequence[Tool] = ()) -> Reply:
        return Reply(self.chat.decode(turn.completion_ids.tolist()))


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
