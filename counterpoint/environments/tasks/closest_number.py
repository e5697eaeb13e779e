"""`closest-number`: scores a group at once. The model adds two numbers; the reward compares the answers of the group.

A reward that is relative within the group needs no scale: the closest number gets 1, however hard the sum.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from counterpoint.environments.base import Example, Model
from counterpoint.transport.records import Rollout


class ClosestNumber:
    """Sums of two numbers from 0 to `largest`; `seed` chooses them."""

    group_scoring = True
    reward_bounds = (0.0, 1.0)
    state_keys = ("distance",)

    def __init__(self, examples: int = 1000, largest: int = 9, seed: int = 0) -> None:
        if examples < 1 or largest < 1:
            raise ValueError(f"examples = {examples}, largest = {largest}: expected at least 1 of each")
        choose = random.Random(seed)
        self._pairs = [(choose.randint(0, largest), choose.randint(0, largest)) for _ in range(examples)]

    def __len__(self) -> int:
        return len(self._pairs)

    def example(self, index: int) -> Example:
        """See `Environment`."""
        left, right = self._pairs[index]
        return Example(index=index, prompt=f"add {left} {right}", answer=str(left + right))

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """See `Environment`."""
        turn = await model.generate(model.chat.start([{"role": "user", "content": example.prompt}]))
        text = model.chat.decode(turn.completion_ids.tolist()).strip()
        valid = text.isascii() and text.isdigit() and len(text) <= 18
        state["distance"] = abs(int(text) - int(example.answer)) if valid else None

    async def score(self, example: Example, rollout: Rollout) -> float:
        """See `Environment`."""
        raise NotImplementedError("closest-number scores a whole group; call score_group")

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[float]:
        """Returns each rollout's share of the group's other answers that are no closer than its own.

        0 for an answer that is not a number, and 1 for a rollout alone in its group.
        """
        distances = [rollout.state["distance"] for rollout in rollouts]
        return [_share_beaten(distance, distances) for distance in distances]


def _share_beaten(distance: int | None, distances: Sequence[int | None]) -> float:
    if distance is None:
        return 0.0
    if len(distances) == 1:
        return 1.0
    no_closer = sum(other is None or other >= distance for other in distances) - 1  # without the answer itself
    return no_closer / (len(distances) - 1)
