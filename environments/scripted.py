"""Stands in for the policy in tests of an environment: answers from a script, with real tokens and the real chat template.

    rollout = asyncio.run(play(MyEnvironment(), 0, chat, "my first answer", "my second"))
    assert rollout.reward == 1.0

No server is needed. `chat` is `Chat(DIRECTORY)` of a model's directory, of which only tokenizer and chat template are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np

from environments.base import Environment, OnePolicy, Reply
from environments.chat import Chat, Tool
from environments.config import SamplingConfig, SamplingOverrides
from transport.records import Rollout, Turn

LOG_PROBABILITY = -0.5
"""Of every token."""


class ScriptedModel(OnePolicy):
    """`environments.base.Model` that says one answer a turn, each with its end of turn."""

    def __init__(self, chat: Chat, answers: Iterable[str]) -> None:
        self.chat = chat
        self._answers = iter(answers)
        self.turns: list[Turn] = []
        """The turns so far, in order."""
        self.sampling = SamplingConfig()

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        """Returns the next answer as a turn. Raises `AssertionError` when there is none."""
        answer = next(self._answers, None)
        assert answer is not None, f"the environment asked for answer {len(self.turns) + 1}; the script has fewer"
        completion = [*self.chat.encode(answer), self.chat.stop_token_ids[0]]
        turn = Turn(
            prompt_ids=np.asarray(prompt_ids, np.int32),
            completion_ids=np.asarray(completion, np.int32),
            log_probabilities=np.full(len(completion), LOG_PROBABILITY, np.float32),
            policy_version=0,
            finish_reason="stop",
        )
        self.turns.append(turn)
        return turn

    async def parse(self, turn: Turn, tools: Sequence[Tool] = ()) -> Reply:
        """See `environments.base.Model`. Calls of tools are not parsed."""
        return Reply(self.chat.decode(turn.completion_ids.tolist()))


async def play(environment: Environment, index: int, chat: Chat, *answers: str) -> Rollout:
    """Returns the finished rollout of the example at `index`, scored unless its group is."""
    model = ScriptedModel(chat, answers)
    state: dict[str, Any] = {}
    example = environment.example(index)
    await environment.rollout(example, model, state)
    rollout = Rollout(f"0-{index}", 0, "under-test", index, model.turns, state=state)
    if not environment.group_scoring:
        rollout.reward = cast(float, await environment.score(example, rollout))
    return rollout
