"""One guess with LangChain (`pip install langchain-openai`), which knows nothing of training.

The model first thinks freely, which is trained. `with_structured_output` then constrains its answer, which is not
(docs/gateway.md). The example comes as JSON on the standard input; the last line that is printed is the reward.
"""

from __future__ import annotations

import json
import sys

import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Guess(BaseModel):
    """A guess of the secret number."""

    number: int = Field(ge=0, le=9)


def play(prompt: str, secret: int) -> float:
    """Returns 1 if the model guesses the secret number, else 0."""
    model = ChatOpenAI(model="policy")
    question = ("user", prompt)
    thought = model.invoke([question])
    try:
        guess = model.with_structured_output(Guess).invoke([question, thought, ("user", "Now your guess, as JSON.")])
    except (ValueError, openai.LengthFinishReasonError):  # no JSON of that form, or cut
        return 0.0
    return float(isinstance(guess, Guess) and guess.number == secret)


def main() -> None:
    """Plays the example of the standard input."""
    example = json.load(sys.stdin)
    print(play(example["prompt"], int(example["answer"])))


if __name__ == "__main__":
    main()
