"""The task of `served.py`: write tokens from one half of the vocabulary, which a random model learns in a few steps."""

from __future__ import annotations

from typing import Any

from counterpoint.environments.base import Example, Model
from counterpoint.transport.records import Rollout


class Ids:
    """Rewards the share of a completion's tokens that are early, or late, in the vocabulary."""

    group_scoring = False

    def __init__(self, early: bool = True) -> None:
        """`early`: which tokens are wanted."""
        self._early = early

    def __len__(self) -> int:
        return 40

    def example(self, index: int) -> Example:
        """Returns a prompt that is a number."""
        return Example(index, str(index))

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """Generates once."""
        await model.generate(model.chat.start([{"role": "user", "content": example.prompt}]))

    async def score(self, example: Example, rollout: Rollout) -> float:
        """Returns the share of wanted tokens."""
        return float(((rollout.turns[-1].completion_ids < 130) == self._early).mean())
