"""A parse is asked of the server that generated, and of others where that does not answer."""

from __future__ import annotations

from typing import Any

import pytest

from counterpoint.inference.base import InferenceError, ParsedText, RequestRefused
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.clients.openai_client import OpenAIClient
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool import calls
from counterpoint.inference.pool.pool import InferencePool
from counterpoint.inference.wire import PARSE_PATH
from tests.support.fake_inference import FakeServer

CALLS = {"content": "", "reasoning": "", "calls": [{"name": "add", "arguments": "{}"}], "malformed": ""}


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PAUSE_SECONDS", 0.0)


async def ask(*servers: FakeServer, first: int = 0, config: dict[str, Any] | None = None) -> ParsedText:
    pool = InferencePool(PoolConfig(urls=[server.url for server in servers], **(config or {}))).model("model")
    await pool.start()
    try:
        await pool.until(lambda: len(pool._fleet.serving(pool.name)) == len(servers))
        return await pool.parse([1, 2], [{}], {}, cut=True, server=servers[first].url)
    finally:
        await pool.release()


async def test_the_server_that_generated_is_asked_first() -> None:
    async with FakeServer() as one, FakeServer() as two:
        two.parsed = CALLS
        assert await ask(one, two, first=1) == ParsedText("", "", (("add", "{}"),))
        assert (one.answers[PARSE_PATH], two.answers[PARSE_PATH]) == (0, 1)


async def test_another_is_asked_where_it_answers_nonsense() -> None:
    async with FakeServer() as one, FakeServer() as two:
        one.parsed = {"content": "no calls"}
        assert await ask(one, two) == ParsedText("text")
        assert (one.answers[PARSE_PATH], two.answers[PARSE_PATH]) == (1, 1)


async def test_a_server_without_a_parser_refuses() -> None:
    async with FakeServer() as one:
        one.parsed = {"error": "this server parses no calls of tools: set tool_parser"}
        with pytest.raises(RequestRefused, match="set tool_parser"):
            await ask(one)
        assert one.answers[PARSE_PATH] == 1


async def test_nonsense_from_all_is_an_error() -> None:
    async with FakeServer() as one:
        one.parsed = {"content": "no calls"}
        with pytest.raises(InferenceError, match=r"after 4 attempts; the last: .* without its fields"):
            await ask(one)


async def test_a_stock_server_without_the_route_says_what_it_needs() -> None:
    async with FakeServer() as one, HttpSessions(PoolConfig()) as connections:
        with pytest.raises(InferenceError, match="--enable-scale-out"):
            await OpenAIClient(one.url, connections).parse([1], [{"maximum": 2**70}], {}, cut=False)


async def test_no_server_in_service() -> None:
    with pytest.raises(InferenceError, match="no inference server is in service"):
        await calls.parse([], [1], [], {}, cut=False, first=None)


async def test_without_tools_those_are_asked_that_parse_reasoning_if_there_are_any() -> None:
    async with FakeServer() as one, FakeServer() as two:
        two.reasons, two.parsed = True, CALLS | {"reasoning": "hm", "calls": []}
        pool = InferencePool(PoolConfig(urls=[one.url, two.url], health_interval_seconds=0.02)).model("model")
        await pool.start()
        try:
            await pool.until(lambda: len(pool._fleet.serving(pool.name)) == 2)
            assert pool.parses_reasoning
            parsed = await pool.parse([1, 2], [], {}, cut=False, server=one.url)
            two.healthy = False
            await pool.until(lambda: len(pool._fleet.serving(pool.name)) == 1)
            assert pool.parses_reasoning, "nobody takes its reasoning for content meanwhile"
            with pytest.raises(InferenceError, match="no inference server is in service"):
                await pool.parse([1, 2], [], {}, cut=False, server=one.url)
        finally:
            await pool.release()
    assert parsed == ParsedText("", "hm")
    async with FakeServer() as one:
        pool = InferencePool(PoolConfig(urls=[one.url])).model("model")
        await pool.start()
        try:
            await pool.until(lambda: len(pool._fleet.serving(pool.name)) == 1)
            assert not pool.parses_reasoning
            assert await pool.parse([1, 2], [], {}, cut=False, server=one.url) == ParsedText("text")
        finally:
            await pool.release()
