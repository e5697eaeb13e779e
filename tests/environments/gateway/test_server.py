"""The endpoint over real sockets, with the stock `openai` client: answers, streams, limits, keys, and ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai

from environments.chat import Chat
from environments.gateway import Gateway, Session
from environments.scripted import ScriptedModel

HELLO: Any = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def client_of(session: Session) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        yield client


async def test_a_conversation_of_the_stock_client_is_one_branch(gateway: Gateway, chat: Chat) -> None:
    model = ScriptedModel(chat, ["one", "two", "three"])
    async with gateway.session(model) as session, client_of(session) as client:
        messages = list(HELLO)
        for said in ("one", "two", "three"):
            answer = await client.chat.completions.create(model="any", messages=messages)
            assert answer.choices[0].message.content == said
            assert answer.choices[0].finish_reason == "stop"
            messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
    first, second, third = model.turns
    for before, after in ((first, second), (second, third)):
        written = [*before.prompt_ids, *before.completion_ids]
        assert after.prompt_ids.tolist()[: len(written)] == written
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(third.prompt_ids)
    assert session.turns == model.turns
