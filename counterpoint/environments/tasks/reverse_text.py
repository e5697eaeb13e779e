"""`reverse-text`: one turn. The model must write a word backwards; the reward is the share of letters in the right place."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from typing import Any

from counterpoint.environments.base import Example, Model
from counterpoint.transport.records import Rollout


class ReverseText:
    """Random words of `shortest` to `longest` lower-case letters; `seed` chooses them.

    No letter is used twice, since a tiny model chooses each letter by the one before it.
    """

    group_scoring = False
    reward_bounds = (0.0, 1.0)
    state_keys = ("answer",)

    def __init__(self, examples: int = 1000, shortest: int = 3, longest: int = 5, seed: int = 0) -> None:
        if examples < 1:
            raise ValueError(f"examples = {examples}: expected at least 1")
        if not 1 <= shortest <= longest <= len(string.ascii_lowercase):
            raise ValueError(f"shortest = {shortest}, longest = {longest}: expected 1 <= shortest <= longest <= 26")
        choose = random.Random(seed)
        self._words = [
            "".join(choose.sample(string.ascii_lowercase, choose.randint(shortest, longest))) for _ in range(examples)
        ]

    def __len__(self) -> int:
        return len(self._words)

    def example(self, index: int) -> Example:
        """See `Environment`."""
        word = self._words[index]
        return Example(index=index, prompt=f"reverse {word}", answer=word[::-1])

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """See `Environment`."""
        turn = await model.generate(model.chat.start([{"role": "user", "content": example.prompt}]))
        state["answer"] = model.chat.decode(turn.completion_ids.tolist())

    async def score(self, example: Example, rollout: Rollout) -> float:
        """Returns the share of right positions, of the longer of answer and word, so that padding gains nothing."""
        answer: str = rollout.state["answer"]
        right = sum(ours == theirs for ours, theirs in zip(answer, example.answer, strict=False))
        return right / max(len(answer), len(example.answer))

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[float]:
        """See `Environment`."""
        raise NotImplementedError("reverse-text scores each rollout by itself")
