"""The environment of the benches of scheduling: turns of a few tokens, and nothing else. Workers load it quickly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counterpoint.environments.base import Example, Model
from counterpoint.transport.records import Rollout

TURNS = 8
PROMPT_TOKENS, REPLY_TOKENS = 64, 8

REPLY = list(range(50, 50 + REPLY_TOKENS))


def first_prompt(index: int) -> list[int]:
    """Returns the prompt of an example."""
    return [1 + index, *range(2, 1 + PROMPT_TOKENS)]


class ShortTurns:
    """An environment with turns of a few tokens, and a reward that differs within a group."""

    group_scoring = False

    def __len__(self) -> int:
        return 1 << 20

    def example(self, index: int) -> Example:
        """Returns no conversation."""
        return Example(index, "")

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """Plays turns whose prompt is the last one, its completion and a reply."""
        prompt = first_prompt(example.index)
        for _ in range(TURNS):
            turn = await model.generate(prompt)
            prompt = [*turn.prompt_ids.tolist(), *turn.completion_ids.tolist(), *REPLY]

    async def score(self, example: Example, rollout: Rollout) -> float:
        """Rewards a rollout by its number."""
        return float(rollout.rollout_id.rpartition("-")[2])

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[float]:
        """Is not called."""
        raise NotImplementedError
