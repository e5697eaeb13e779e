"""An agent as anybody writes one: it plays a guessing game with the stock `openai` client, and knows nothing of training.

The client finds the endpoint in OPENAI_BASE_URL and OPENAI_API_KEY. The example comes as JSON on the standard input; the last
line that is printed is the reward. `job.toml` trains it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

GUESSES = 3


def play(client: openai.OpenAI, prompt: str, secret: int) -> float:
    """Returns 1 if the model finds the secret number, else 0."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(GUESSES):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        guess = (answer.content or "").strip()
        if not (guess.isascii() and guess.isdigit() and len(guess) <= 3):
            return 0.0
        if int(guess) == secret:
            return 1.0
        messages += [answer, {"role": "user", "content": "higher" if int(guess) < secret else "lower"}]
    return 0.0


def main() -> None:
    """Plays the example of the standard input."""
    example = json.load(sys.stdin)
    with openai.OpenAI() as client:
        print(play(client, example["prompt"], int(example["answer"])))


if __name__ == "__main__":
    main()
