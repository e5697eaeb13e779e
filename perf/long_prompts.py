"""Measures how long the event loop is held while eight long prompts are tokenised beside it, as first turns of agents are.

    python -m perf.long_prompts [--tokens 131000] [--prompts 8] [--rounds 6]

Each round has the loop idle, then the prompts by `Chat.start` and `packed` in threads, as the gateway does it, then in the plain
way: the tokenizer's `encode_batch` in threads, and an array made of its list on the loop. The figure of a round is its longest
lag.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import string
import time
from collections.abc import Awaitable, Callable

import numpy as np
import uvloop
from numpy.typing import NDArray
from tokenizers import Tokenizer

from environments.chat import Chat, packed
from models.make_model import resolve_model
from orchestrator.loop_health.threads import prompt_switching

Encode = Callable[[str], Awaitable[NDArray[np.int32]]]


async def measure(chat: Chat, tokenizer: Tokenizer, texts: list[str], rounds: int) -> dict[str, list[float]]:
    """Returns the longest lag of each round in seconds, by the way: `idle`, `ours`, `plain`; and checks that both ways agree."""

    async def ours(text: str) -> NDArray[np.int32]:
        messages = [{"role": "user", "content": text}]
        return np.asarray(await asyncio.to_thread(lambda: packed(chat.start(messages))), np.int32)

    async def plain(text: str) -> NDArray[np.int32]:
        rendered = chat.render([{"role": "user", "content": text}], add_generation_prompt=True)
        encodings = await asyncio.to_thread(tokenizer.encode_batch, [rendered], add_special_tokens=False)
        return np.asarray(encodings[0].ids, np.int32)

    found: dict[str, list[float]] = {"idle": [], "ours": [], "plain": []}
    for _ in range(rounds):
        found["idle"].append(await _longest(asyncio.sleep(0.5)))
        results: list[list[NDArray[np.int32]]] = []
        for name, encode in (("ours", ours), ("plain", plain)):
            found[name].append(await _longest(_all(encode, texts, results)))
        if not all(np.array_equal(one, other) for one, other in zip(*results, strict=True)):
            raise RuntimeError("the two ways gave other ids")
    return found


async def _all(encode: Encode, texts: list[str], results: list[list[NDArray[np.int32]]]) -> None:
    results.append(await asyncio.gather(*map(encode, texts)))


async def _longest(work: Awaitable[None]) -> float:
    """Returns the longest lag of a sleep of a millisecond while `work` is done."""
    task, longest = asyncio.ensure_future(work), 0.0
    while not task.done():
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - began - 0.001)
    await task
    return longest


def text_of(chat: Chat, tokens: int, seed: int) -> str:
    """Returns words of about so many tokens."""
    source = random.Random(seed)
    words = ["".join(source.choices(string.ascii_lowercase, k=source.randint(2, 9))) for _ in range(5000)]
    sample = " ".join(source.choices(words, k=1000))
    return " ".join(source.choices(words, k=1000 * tokens // len(chat.encode(sample))))


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m perf.long_prompts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=131_000, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=8, help="at once")
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    model = resolve_model("tiny-dense")
    chat, tokenizer = Chat(model), Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [text_of(chat, given.tokens, seed) for seed in range(given.prompts)]
    with prompt_switching():
        found = uvloop.run(measure(chat, tokenizer, texts, given.rounds))
    for name, lags in found.items():
        print(f"{name:6} longest lag: median {1000 * statistics.median(lags):.1f} ms, worst {1000 * max(lags):.1f} ms")
    print(f"ours over plain: {statistics.median(found['ours']) / statistics.median(found['plain']):.2f}")


if __name__ == "__main__":
    main()
