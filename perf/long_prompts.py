"""Measures how long the event loop is held while the gateway is asked for eight long first turns at once.

    python -m perf.long_prompts [--tokens 131000] [--prompts 8] [--rounds 6]

Each round has the loop idle; then the prompts, all different, sent to the gateway by another process (`first`), once more and
all equal (`equal`), and once more with a second message after the answer (`second`); and the plain way without any gateway: the
tokenizer's `encode_batch` in threads, and an array made of its list on the loop (`plain`). The figure of a round is its longest
lag. *Given up* is how much of that lag the loop's thread or another one of the process was ready and had no core, by the kernel's
count: beside other programs a lag is mostly that. Without it, what is left is what the work itself holds.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import multiprocessing
import random
import statistics
import string
import threading
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import numpy as np
import orjson
import uvloop
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, trainers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Both

from environments.chat import Chat
from environments.gateway import Gateway, Session
from environments.scripted import ScriptedModel
from models.tiny_tokenizer import SPECIAL_TOKENS, write_tokenizer
from orchestrator.loop_health.threads import prompt_switching

ANSWER = "so it is"
_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizers divide a text before they merge bytes."""

Lag = tuple[float, float]
"""The longest lag, and that less what was given up of it, in seconds."""


def write_words(directory: Path) -> Path:
    """Writes a tokenizer whose tokens are words and parts of them, with the files of the built-in models beside it."""
    write_tokenizer(directory, longest=2**20)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Both([Split(_WORDS, "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([text_of(20_000, seed) for seed in range(4)], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def text_of(words: int, seed: int) -> str:
    """Returns so many words of prose: sentences and paragraphs."""
    source = random.Random(seed)
    known = ["".join(source.choices(string.ascii_lowercase, k=source.randint(2, 9))) for _ in range(5000)]
    ends = source.choices([" ", ", ", ". ", "\n\n"], weights=[84, 8, 7, 1], k=words)
    return "".join(word + end for word, end in zip(source.choices(known, k=words), ends, strict=True))


def texts_of(directory: Path, prompts: int, tokens: int) -> list[str]:
    """Returns texts of about so many tokens each."""
    chat, sample = Chat(directory), text_of(1000, 0)
    words = 1000 * tokens // len(chat.encode(sample))
    return [text_of(words, seed) for seed in range(prompts)]


# --- the process that asks ---

_texts: list[str] = []


def prepare(directory: Path, prompts: int, tokens: int) -> None:
    """Makes the texts in the process that asks."""
    _texts[:] = texts_of(directory, prompts, tokens)


def ask(endpoints: Sequence[tuple[str, str]], kind: str) -> None:
    """Sends a request to each endpoint at once; returns when all are answered."""
    texts = _texts[:1] * len(endpoints) if kind == "equal" else _texts
    bodies = [_body(text, kind) for text in texts]
    with ThreadPoolExecutor(len(endpoints)) as threads:
        list(threads.map(_post, endpoints, bodies))


def _body(text: str, kind: str) -> bytes:
    messages = [{"role": "user", "content": text}]
    if kind == "second":
        messages += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "and then?"}]
    return orjson.dumps({"model": "policy", "messages": messages})


def _post(endpoint: tuple[str, str], body: bytes) -> None:
    url, key = endpoint
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", f"{place.path}/chat/completions", body, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"the gateway answered {answer.status}: {content[:200]!r}")


# --- the process that answers ---


async def measure(directory: Path, prompts: int, tokens: int, rounds: int) -> dict[str, list[Lag]]:
    """Returns the lags of each round, by the way: `idle`, `first`, `equal`, `second`, `plain`; and checks the gateway's ids."""
    tokenizer, texts = Tokenizer.from_file(str(directory / "tokenizer.json")), texts_of(directory, prompts, tokens)
    asking = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare, (directory, prompts, tokens))
    found: dict[str, list[Lag]] = {way: [] for way in ("idle", "first", "equal", "second", "plain")}
    async with AsyncExitStack() as resources:
        resources.callback(asking.shutdown)
        gateway = Gateway()
        resources.push_async_callback(gateway.close)
        for _ in range(rounds):
            found["idle"].append(await _longest(asyncio.sleep(0.5)))
            chat = Chat(directory)  # which has seen no prompt
            plain: list[NDArray[np.int32]] = []
            found["plain"].append(await _longest(_plainly(chat, tokenizer, texts, plain)))
            models = [ScriptedModel(chat, [ANSWER] * 2) for _ in texts]
            async with AsyncExitStack() as open_sessions:
                sessions = [await open_sessions.enter_async_context(gateway.session(model)) for model in models]
                for kind in ("first", "second"):
                    found[kind].append(await _longest(_asked(asking, sessions, kind)))
            for model, expected in zip(models, plain, strict=True):
                if not np.array_equal(model.turns[0].prompt_ids, expected):
                    raise RuntimeError("the gateway and the plain way gave other ids")
            chat = Chat(directory)
            models = [ScriptedModel(chat, [ANSWER]) for _ in texts]
            async with AsyncExitStack() as open_sessions:
                sessions = [await open_sessions.enter_async_context(gateway.session(model)) for model in models]
                found["equal"].append(await _longest(_asked(asking, sessions, "equal")))
    return found


async def _asked(asking: ProcessPoolExecutor, sessions: Sequence[Session], kind: str) -> None:
    endpoints = [(session.base_url, session.api_key) for session in sessions]
    await asyncio.get_running_loop().run_in_executor(asking, ask, endpoints, kind)


async def _plainly(chat: Chat, tokenizer: Tokenizer, texts: Sequence[str], found: list[NDArray[np.int32]]) -> None:
    async def encode(text: str) -> NDArray[np.int32]:
        rendered = chat.render([{"role": "user", "content": text}], add_generation_prompt=True)
        encodings = await asyncio.to_thread(tokenizer.encode_batch, [rendered], add_special_tokens=False)
        return np.asarray(encodings[0].ids, np.int32)

    found += await asyncio.gather(*map(encode, texts))


async def _longest(work: Awaitable[None]) -> Lag:
    """Returns the longest lag of a sleep of a millisecond while `work` is done, and the longest without what was given up."""
    task, longest, own = asyncio.ensure_future(work), 0.0, 0.0
    while not task.done():
        waited, began = _waited_for_a_core(), time.perf_counter()
        await asyncio.sleep(0.001)
        lag = time.perf_counter() - began - 0.001
        longest = max(longest, lag)
        if lag > own:
            own = max(own, lag - (_waited_for_a_core() - waited))
    await task
    return longest, own


def _waited_for_a_core() -> float:
    """Returns how long the threads of this process have been ready without running, in seconds."""
    waited = 0
    for thread in threading.enumerate():
        try:
            waited += int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[1])
        except FileNotFoundError:
            continue  # it has ended
    return waited / 1e9


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m perf.long_prompts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=131_000, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=8, help="at once")
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    with TemporaryDirectory(prefix="long-prompts-") as directory, prompt_switching():
        found = uvloop.run(measure(write_words(Path(directory)), given.prompts, given.tokens, given.rounds))
    for name, lags in found.items():
        longest, own = (
            f"median {1000 * statistics.median(each):.1f}, worst {1000 * max(each):.1f}"
            for each in zip(*lags, strict=True)
        )
        print(f"{name:6} longest lag in ms: {longest}; less what was given up: {own}")


if __name__ == "__main__":
    main()
