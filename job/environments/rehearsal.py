"""Plays an environment with made-up answers, before any server starts: most mistakes in its code are named within seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from counterpoint.environments.base import Example
from counterpoint.environments.chat import Chat
from counterpoint.inference.base import ParsedText, SamplingParameters
from counterpoint.transport.records import Int32Array, Rollout, Turn

SECONDS = 10.0
"""A rollout may take so long; a longer one is left to the check with a server, which has the environment's own deadline."""

LONGEST = 4096
"""Tokens of a context where that of the server is not known. A prompt beyond it is refused, as a server does."""


class MadeUp:
    """A pool that answers every prompt with the same text."""

    parses_reasoning = False

    def __init__(self, chat: Chat, answer: str, context: int) -> None:
        self._chat, self._answer, self._context = chat, answer, context
        self._turns = 0

    async def generate(self, prompt_ids: Int32Array, sampling: SamplingParameters, **_keywords: Any) -> Turn:
        """Returns the answer as a turn."""
        await asyncio.sleep(0)  # as a server's would: whoever asks until an answer is right has a deadline
        if len(prompt_ids) >= self._context:
            after = f" after {self._turns} turns: the conversation does not end before that" if self._turns else ""
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in {self._context} tokens of context{after}; shorten it, "
                "or raise max_model_len"
            )
        self._turns += 1
        said = [*self._chat.encode(self._answer)[: sampling.max_tokens], sampling.stop_token_ids[0]]
        completion = np.array(said, np.int32)
        return Turn(np.asarray(prompt_ids), completion, np.full(len(said), -0.5, np.float32), 0, "stop")

    async def parse(self, token_ids: list[int], *_arguments: Any, **_keywords: Any) -> ParsedText:
        """Returns what the turn says, without calls."""
        return ParsedText(self._chat.decode(token_ids))


def answers_to(example: Example) -> Sequence[str]:
    """Returns what is answered, one text a rollout: what is right, and what is not."""
    return [example.answer or "42", "7", "I do not know."]


async def rehearse(
    play: Callable[[MadeUp], Any], chat: Chat, example: Example, seconds: float, context: int
) -> list[Rollout]:
    """Returns the rollouts of an example with each answer, until `seconds` have passed. `play` plays one with a pool.

    `context` is the most tokens that a server holds.
    """
    played: list[Rollout] = []
    began = time.monotonic()
    for answer in answers_to(example):
        played.append(await play(MadeUp(chat, answer, context)))
        if time.monotonic() - began >= seconds:
            break
    return played


def is_late(rollout: Rollout) -> bool:
    """Whether it missed the deadline of a rehearsal while it waited."""
    return (rollout.error or "").startswith("missed its deadline")
