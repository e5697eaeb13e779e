"""The guessing game with Pydantic AI (`pip install "pydantic-ai-slim[openai]"`), which knows nothing of training.

The model guesses by a tool. The example comes as JSON on the standard input; the last line that is printed is the reward.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress

from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel

GUESSES = 3


def play(prompt: str, secret: int) -> float:
    """Returns 1 if the model finds the secret number, else 0."""
    guesses = list[int]()
    agent = Agent(OpenAIChatModel("policy"), instructions="Find the secret number: call guess.")

    @agent.tool_plain
    def guess(number: int) -> str:
        """Guesses the secret number. Returns 'higher', 'lower' or 'right'."""
        guesses.append(number)
        return "right" if number == secret else "higher" if number < secret else "lower"

    # A model that ends its turn without a word, or its calls with wrong arguments, has not found the number.
    with suppress(UsageLimitExceeded, UnexpectedModelBehavior):
        agent.run_sync(prompt, usage_limits=UsageLimits(request_limit=GUESSES + 1))
    return float(secret in guesses[:GUESSES])


def main() -> None:
    """Plays the example of the standard input."""
    example = json.load(sys.stdin)
    print(play(example["prompt"], int(example["answer"])))


if __name__ == "__main__":
    main()
