"""The guessing game with Anthropic's SDK (`pip install anthropic`), which knows nothing of training.

The model guesses by a tool. The example comes as JSON on the standard input; the last line that is printed is the reward.
"""

from __future__ import annotations

import json
import sys

import anthropic
from anthropic.types import MessageParam, ToolParam, ToolResultBlockParam

GUESSES = 3
TOOL: ToolParam = {
    "name": "guess",
    "description": "Guesses the secret number. Returns 'higher', 'lower' or 'right'.",
    "input_schema": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
}


def play(prompt: str, secret: int) -> float:
    """Returns 1 if the model finds the secret number, else 0."""
    guesses = list[object]()
    messages: list[MessageParam] = [{"role": "user", "content": prompt}]
    with anthropic.Anthropic() as client:
        for _ in range(GUESSES + 1):
            answer = client.messages.create(
                model="policy",
                max_tokens=256,
                system="Find the secret number: call guess.",
                messages=messages,
                tools=[TOOL],
            )
            results = list[ToolResultBlockParam]()
            for block in answer.content:
                if block.type == "tool_use":
                    guesses.append(block.input.get("number"))
                    results.append(
                        {"type": "tool_result", "tool_use_id": block.id, "content": said(guesses[-1], secret)}
                    )
            if not results:
                break
            messages += [answer.to_param(), {"role": "user", "content": results}]
    return float(secret in guesses[:GUESSES])


def said(number: object, secret: int) -> str:
    """Returns what the tool says of a guess, which may be anything that the model wrote."""
    if not isinstance(number, int):
        return "number is no integer"
    return "right" if number == secret else "higher" if number < secret else "lower"


def main() -> None:
    """Plays the example of the standard input."""
    example = json.load(sys.stdin)
    print(play(example["prompt"], int(example["answer"])))


if __name__ == "__main__":
    main()
