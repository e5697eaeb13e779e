"""`arithmetic`: sums and products that a small model cannot do in its head, with a calculator as a tool.

The model may call the calculator, and then answers with a number; the reward is 1 if it is right, else 0. An observation tells
the model what is wrong with a malformed call, and it may try again.
"""

from __future__ import annotations

import random

from counterpoint.environments.base import Example
from counterpoint.environments.tools.built_in import calculator_tool
from counterpoint.environments.tools.environment import ToolEnvironment
from counterpoint.transport.records import Rollout

OPERATIONS = "+-*"
CALCULATOR = "calculator"


class Arithmetic(ToolEnvironment):
    """Two numbers of two digits and an operation; `seed` chooses them. A rollout has at most `max_turns` turns."""

    state_keys = ("answer", "tools")
    reward_bounds = (0.0, 1.0)

    def __init__(self, examples: int = 1000, seed: int = 0, max_turns: int = 3) -> None:
        if examples < 1:
            raise ValueError(f"examples = {examples}: expected at least 1")
        super().__init__(tools=[calculator_tool(CALCULATOR)], max_turns=max_turns)
        choose = random.Random(seed)
        self._tasks = [
            (choose.randint(10, 99), choose.choice(OPERATIONS), choose.randint(10, 99)) for _ in range(examples)
        ]

    def __len__(self) -> int:
        return len(self._tasks)

    def example(self, index: int) -> Example:
        """See `Environment`."""
        left, operation, right = self._tasks[index]
        answer = {"+": left + right, "-": left - right, "*": left * right}[operation]
        return Example(index=index, prompt=f"{left}{operation}{right}=?", answer=str(answer))

    async def reward(self, example: Example, rollout: Rollout, answer: str) -> float:
        """Returns 1 for the right number."""
        return float(answer.strip() == example.answer)
