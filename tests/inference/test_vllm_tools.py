"""A real server reads calls of tools with vLLM's parsers, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.tools.hermes import write_hermes
from counterpoint.inference.base import ParsedText, RequestRefused
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.clients.openai_client import OpenAIClient
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]


def parser_processes(server: ServerProcess) -> list[int]:
    """Returns the ids of the server's processes that parse."""
    return [
        pid
        for pid in server.family()
        if b"counterpoint.inference.plugin.parse_worker" in (command := Path(f"/proc/{pid}/cmdline").read_bytes())
        if b"transport/process/launch.py" not in command
    ]


async def test_calls_are_parsed_beside_the_server(moe_server: ServerProcess) -> None:
    chat = Chat(moe_server.config.model)
    pool = InferencePool(PoolConfig(urls=[moe_server.url])).model(moe_server.config.model)
    await pool.start()

    async def parse(text: str, tools: list[Any] = TOOLS, *, cut: bool = False) -> ParsedText:
        return await pool.parse(chat.encode(text), tools, {}, cut=cut, server=moe_server.url)

    try:
        assert await parse("just text") == ParsedText("just text")
        call = write_hermes("add", {"a": 1})
        assert await parse(f"I add.{call}{call}") == ParsedText("I add.", "", (("add", '{"a": 1}'),) * 2)
        assert await parse(call, tools=[]) == ParsedText(call)
        broken = await parse('<tool_call>{"name": "add", "arguments"')
        assert (broken.calls, bool(broken.malformed)) == ((), True)
        # A text on which Hermes's pattern takes long: nothing hangs, whatever it finds.
        assert (await parse("<tool_call>" * 40)).calls == ()
        cut = await parse(f"{call}{call[:-20]}", cut=True)
        assert (cut.calls, bool(cut.malformed)) == ((("add", '{"a": 1}'),), True)
        with pytest.raises(RequestRefused, match="400"):
            await parse(call, tools=[{"type": "hammer"}])
        assert await parse("still there") == ParsedText("still there")
        assert len(parser_processes(moe_server)) == 1
        with pytest.raises(RequestRefused, match="ids of at most one context"):
            await pool.parse([10**9], TOOLS, {}, cut=False, server=None)
    finally:
        await pool.release()


async def test_a_stock_server_parses_by_its_own_route(moe_server: ServerProcess) -> None:
    chat, call = Chat(moe_server.config.model), write_hermes("add", {"a": 1})
    async with HttpSessions(PoolConfig()) as connections:
        client = OpenAIClient(moe_server.url, connections)
        parsed = await client.parse(chat.encode(f"I add.{call}"), TOOLS, {}, cut=True)
        assert parsed == ParsedText("I add.", "", (("add", '{"a": 1}'),))
        assert await client.parse(chat.encode("text"), [], {}, cut=False) == ParsedText("text")
