"""Plays an environment with made-up answers, before any server starts: most mistakes in its code are named within seconds."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from counterpoint.environments.base import Environment, Example
from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.inference.base import ParsedText, SamplingParameters
from counterpoint.job.environments import waiting
from counterpoint.orchestrator.rollouts.play import LoadedEnvironment, PolicyModel, play, score_group
from counterpoint.orchestrator.rollouts.rollout_file import RolloutStateError, saved_state
from counterpoint.orchestrator.step.finalize import find_fault
from counterpoint.transport.records import Int32Array, Rollout, SavedState, Turn

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
    config: EnvironmentConfig,
    environment: Environment,
    parameters: SamplingParameters,
    chat: Chat,
    context: int,
    say: Callable[[str], None],
    opponents: Sequence[str] = (),
) -> list[Rollout]:
    """Returns the scored rollouts of the first example with each made-up answer, those that it got to in `SECONDS`.

    The environment, which `config` describes, is started already. `context` is the most tokens that a server holds. A rollout
    that missed its deadline while it waited is left out. `say` gets a line while one is waited for.
    """
    loaded = LoadedEnvironment(config.model_copy(update={"rollout_timeout_seconds": SECONDS}), environment)
    example, began = environment.example(0), time.monotonic()
    played: list[Rollout] = []
    for answer in answers_to(example):
        pool, rollout = MadeUp(chat, answer, context), Rollout("rehearsal", 0, config.name, 0)
        model = PolicyModel(rollout, chat, pool, parameters, dict.fromkeys(opponents, pool))
        await watched(play(loaded, rollout, model), environment, say, SECONDS)
        if not (rollout.error or "").startswith("missed its deadline"):
            played.append(rollout)
        if time.monotonic() - began >= SECONDS:
            break
    if environment.group_scoring and played:
        await watched(score_group(loaded, played), environment, say, SECONDS)
    for rollout in played:
        finish(rollout)
    gc.collect()  # coroutines that nobody awaited are named then
    return played


async def watched(
    work: Coroutine[Any, Any, Any], environment: Environment, say: Callable[[str], None], most_blocked_seconds: float
) -> None:
    """Awaits `work` of the environment; `say` gets a line while it lasts. Code that blocks the loop for so long is ended."""
    task = asyncio.create_task(work, name="watched by a check")
    with waiting.saying([task], type(environment).__module__, say, most_blocked_seconds):
        await task


def finish(rollout: Rollout) -> None:
    """Fails a rollout that could not be trained on or recorded, as a run does."""
    try:
        saved_state(rollout)
    except RolloutStateError as error:
        rollout.error = rollout.error or str(error)
        rollout.saved = SavedState(metrics=b"{}", state=b"{}")
    rollout.error = rollout.error or find_fault(rollout)
