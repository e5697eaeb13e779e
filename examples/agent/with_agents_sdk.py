"""The guessing game with OpenAI's Agents SDK (`pip install openai-agents`), which knows nothing of training.

The model guesses by a tool. The example comes as JSON on the standard input; the last line that is printed is the reward.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress

from agents import Agent, MaxTurnsExceeded, Runner, function_tool

GUESSES = 3


def play(prompt: str, secret: int) -> float:
    """Returns 1 if the model finds the secret number, else 0."""
    guesses = list[int]()

    @function_tool
    def guess(number: int) -> str:
        """Guesses the secret number. Returns 'higher', 'lower' or 'right'."""
        guesses.append(number)
        return "right" if number == secret else "higher" if number < secret else "lower"

    agent = Agent(name="guesser", instructions="Find the secret number: call guess.", tools=[guess])
    with suppress(MaxTurnsExceeded):
        Runner.run_sync(agent, prompt, max_turns=GUESSES + 1)
    return float(secret in guesses[:GUESSES])


def main() -> None:
    """Plays the example of the standard input."""
    example = json.load(sys.stdin)
    print(play(example["prompt"], int(example["answer"])))


if __name__ == "__main__":
    main()
