"""What a stock server is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from counterpoint.inference.base import ScoreRequest, ServerUnreachable
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.clients.openai_client import OpenAIClient, _alternatives
from counterpoint.inference.config import PoolConfig

CONTEXT = 8


@pytest.mark.parametrize(("tokens", "context"), [(2, CONTEXT), (7, CONTEXT), (8, CONTEXT), (4, None)])
async def test_a_score_asks_for_given_tokens_only_where_they_fill_the_context(tokens: int, context: int | None) -> None:
    """Else it would take the most probable tokens from others. Each score is that of its own token."""
    asked: list[dict[str, Any]] = []

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": context}]})

    async def complete(request: web.Request) -> web.Response:
        asked.append(fields := orjson.loads(await request.read()))
        rows = [None, *({str(token): {"logprob": -float(token)}} for token in fields["prompt"][1:])]
        top = {f"token_id:{token}": -float(token) for token in fields.get("logprob_token_ids", [])}
        return web.json_response({"choices": [{"prompt_logprobs": rows, "logprobs": {"top_logprobs": [top]}}]})

    app = web.Application()
    app.add_routes([web.get("/health", models), web.get("/v1/models", models), web.post("/v1/completions", complete)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with HttpSessions(PoolConfig()) as connections:
            client = OpenAIClient(f"http://127.0.0.1:{runner.addresses[0][1]}", connections)
            await client.identify()
            scores = await client.score(ScoreRequest("m", np.arange(10, 10 + tokens, dtype=np.int32), 1))
    finally:
        await runner.cleanup()
    assert scores.log_probabilities.tolist() == [-float(token) for token in range(11, 10 + tokens)]
    fits = context is not None and tokens < context
    assert ("logprob_token_ids" in asked[0]) is not fits
    assert len(asked[0]["prompt"]) < (context or 99)


async def test_a_server_that_comes_back_is_asked_for_its_context_again(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = iter([8, 4])

    async def call(_session: object, url: str, _body: object) -> bytes:
        if is_down:
            raise ServerUnreachable("it is being started anew")
        return orjson.dumps({"data": [{"max_model_len": next(contexts)}]} if url.endswith("/v1/models") else {})

    monkeypatch.setattr("counterpoint.inference.clients.openai_client.call", call)
    is_down = False
    async with HttpSessions(PoolConfig()) as connections:
        client = OpenAIClient("http://a:1", connections)
        for _ in range(2):
            await client.identify()
        assert client._context == 8
        is_down = True
        with pytest.raises(ServerUnreachable):
            await client.identify()
        is_down = False
        await client.identify()
    assert client._context == 4


def test_the_sampled_token_is_no_alternative_unless_it_is_among_the_most_probable() -> None:
    rows = [
        {"token_id:4": -3.0, "token_id:7": -0.5, "token_id:2": -1.0},
        {"token_id:8": -0.25, "token_id:1": -2.0},
    ]
    found = _alternatives(rows, 2)
    assert found.token_ids_TK.tolist() == [[7, 2], [8, 1]]
    assert found.log_probabilities_TK.tolist() == [[-0.5, -1.0], [-0.25, -2.0]]


async def test_requests_name_the_newest_version_of_an_adapter() -> None:
    async with HttpSessions(PoolConfig()) as connections:
        client = OpenAIClient("http://nowhere", connections)
        client._adapters["mine"] = ["mine@1", "mine@2"]
        assert [client._name(each) for each in ("mine", "other")] == ["mine@2", "other"]
