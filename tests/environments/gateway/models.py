"""Models for the gateway's tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import openai

from counterpoint.environments.base import Reply, ToolCall
from counterpoint.environments.chat import Chat, Tool
from counterpoint.environments.gateway import Session
from counterpoint.environments.sampling import SamplingOverrides
from counterpoint.environments.scripted import ScriptedModel
from counterpoint.transport.records import Turn


class RecordingModel(ScriptedModel):
    """Remembers how each call was sampled; makes a call of `call:ARGUMENT` and finds `bad:` malformed.

    A turn that holds `cut` was cut.
    """

    def __init__(self, chat: Chat, answers: Iterable[str]) -> None:
        super().__init__(chat, answers)
        self.asked: list[SamplingOverrides | None] = []
        self.parsed: list[list[Tool]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        self.asked.append(sampling)
        turn = await super().generate(prompt_ids, sampling)
        if "cut" in self.chat.decode(turn.completion_ids.tolist()):
            ids, values = turn.completion_ids[:-1], turn.log_probabilities[:-1]
            turn = self.turns[-1] = replace(turn, completion_ids=ids, log_probabilities=values, finish_reason="length")
        return turn

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        self.parsed.append(list(tools))
        text = self.chat.decode(turn.completion_ids.tolist())
        if tools and text.startswith("call:"):
            cut = "Your turn was cut." if turn.finish_reason == "length" else ""
            return Reply("", "because", (ToolCall(f"call_{len(self.turns)}", "look", {"at": text[5:]}),), cut)
        return Reply("", malformed="no JSON") if text.startswith("bad:") else Reply(text)


class WaitingModel(ScriptedModel):
    """Waits before each answer until it may go on."""

    def __init__(self, chat: Chat, answers: Iterable[str]) -> None:
        super().__init__(chat, answers)
        self.gate = asyncio.Event()
        self.begun = 0
        self.cancelled = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        self.begun += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().generate(prompt_ids, sampling)


class FailingModel(ScriptedModel):
    """Raises instead of every answer."""

    def __init__(self, chat: Chat, error: Exception) -> None:
        super().__init__(chat, [])
        self._error = error

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        raise self._error


@asynccontextmanager
async def client_of(session: Session, api_key: str | None = None) -> AsyncIterator[openai.AsyncOpenAI]:
    """The stock client of a session, which tries everything once."""
    key = session.api_key if api_key is None else api_key
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=key, max_retries=0) as client:
        yield client


def extends(after: Turn, before: Turn) -> bool:
    """Whether a turn's prompt begins with all tokens of another."""
    written = [*before.prompt_ids.tolist(), *before.completion_ids.tolist()]
    return after.prompt_ids.tolist()[: len(written)] == written
