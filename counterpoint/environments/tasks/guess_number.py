"""`guess-number`: several turns. The model must find a secret number; the reply to a wrong guess is `higher` or `lower`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counterpoint.environments.base import Example, Model
from counterpoint.transport.records import Rollout


class GuessNumber:
    """One example for each secret from 1 to `largest`. With `guesses` at least log2(largest + 1) the game can always be won."""

    group_scoring = False
    reward_bounds = (0.0, 1.0)
    state_keys = ("guesses",)

    def __init__(self, largest: int = 7, guesses: int = 3) -> None:
        if largest < 2 or guesses < 1:
            raise ValueError(f"largest = {largest}, guesses = {guesses}: expected at least 2 and 1")
        self.largest = largest
        self.guesses = guesses

    def __len__(self) -> int:
        return self.largest

    def example(self, index: int) -> Example:
        """See `Environment`."""
        if not 0 <= index < self.largest:
            raise IndexError(f"example {index}: expected 0 to {self.largest - 1}")
        return Example(index=index, prompt=f"guess 1-{self.largest}", answer=str(index + 1))

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """See `Environment`."""
        secret = int(example.answer)
        guesses: list[int] = state.setdefault("guesses", [])
        prompt_ids: Sequence[int] = model.chat.start([{"role": "user", "content": example.prompt}])
        while True:
            turn = await model.generate(prompt_ids)
            guess = _whole_number(model.chat.decode(turn.completion_ids.tolist()))
            if guess is None or not 1 <= guess <= self.largest:
                return  # not a guess: the game is over, without the reward
            guesses.append(guess)
            if guess == secret or len(guesses) == self.guesses:
                return
            reply = "higher" if guess < secret else "lower"
            prompt_ids = model.chat.extend(turn, [{"role": "user", "content": reply}])

    async def score(self, example: Example, rollout: Rollout) -> float:
        """Returns 1 if the secret was found, else 0: credit for a near guess would also reward bad questions."""
        guesses = rollout.state["guesses"]
        return 1.0 if guesses and guesses[-1] == int(example.answer) else 0.0

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[float]:
        """See `Environment`."""
        raise NotImplementedError("guess-number scores each rollout by itself")


def _whole_number(text: str) -> int | None:
    """Returns the text as a number, of at most 18 digits and no other characters; else None."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
