"""MCP servers as tools: a program, and an address; what they answer, and what happens when they are gone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.tools import mcp_server
from counterpoint.environments.tools.definition import ToolError, ToolFunction, ToolUnavailable
from counterpoint.environments.tools.mcp_server import McpConfig, McpServer
from counterpoint.environments.tools.toolbox import Toolbox
from tests.support.ports import free_port

SERVER = Path(__file__).with_name("a_server.py")
COMMAND = [sys.executable, str(SERVER)]
ADD = {"left": 1, "right": 2}

pytestmark = [
    pytest.mark.skipif(find_spec("mcp") is None, reason="the extra `mcp` is not installed"),
]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_server, "LONGEST_PAUSE_SECONDS", 0.5)


def by_name(tools: list[ToolFunction]) -> dict[str, ToolFunction]:
    return {tool.name: tool for tool in tools}


@pytest.mark.slow
async def test_a_program(tmp_path: Path) -> None:
    server = McpServer(McpConfig(kind="mcp", command=COMMAND, prefix="my ", start_seconds=200))
    await server.start(tmp_path / "env")
    try:
        tools = by_name(server.tools)
        assert list(tools) == ["my_add", "my_keep", "my_fail", "my_die", "my_flood"]
        assert tools["my_add"].definition["function"] == {
            "name": "my_add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"left": {"type": "integer"}, "right": {"type": "integer"}},
                "required": ["left", "right"],
            },
        }
        assert await tools["my_add"].call(ADD, {}) == "3"
        with pytest.raises(ToolError, match="the tool broke"):
            await tools["my_fail"].call({}, {})
        assert len(await tools["my_flood"].call({}, {})) == 1 << 20
        assert await tools["my_keep"].call({"text": "a"}, {}) == "a"
        with pytest.raises(ToolUnavailable, match=r"MCP server '.*a_server\.py': .*call of 'die'"):
            await tools["my_die"].call({}, {})
        # It comes back, as another process.
        assert await tools["my_keep"].call({"text": "b"}, {}) == "b"
        (log,) = (tmp_path / "env").iterdir()
        assert log.read_text().count("a server on standard error") == 2
    finally:
        await server.close()
    with pytest.raises(ToolUnavailable, match="is not started"):
        await tools["my_add"].call(ADD, {})


@pytest.mark.slow
async def test_an_address_that_goes_and_comes_back() -> None:
    port = free_port()

    def serve() -> subprocess.Popen[bytes]:
        command = [*COMMAND, str(port)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    process = await asyncio.to_thread(serve)
    config = McpConfig(kind="mcp", url=f"http://127.0.0.1:{port}/mcp", tools=["add"], start_seconds=200)
    server = McpServer(config)
    try:
        await server.start()
        (add,) = server.tools
        assert await add.call(ADD, {}) == "3"
        process.kill()
        await asyncio.to_thread(process.wait)
        with pytest.raises(ToolUnavailable, match=f"http://127.0.0.1:{port}/mcp: the connection was lost"):
            await add.call(ADD, {})
        process = await asyncio.to_thread(serve)
        assert await add.call(ADD, {}) == "3"
    finally:
        await server.close()
        process.kill()
        await asyncio.to_thread(process.wait)


@pytest.mark.slow
async def test_a_session_for_each_rollout() -> None:
    toolbox = Toolbox([{"kind": "mcp", "command": COMMAND, "session": "rollout", "start_seconds": 200}, "calculator"])
    await toolbox.start()

    async def play(text: str) -> Any:
        async with toolbox.for_rollout() as tools:
            assert tools[0].name == "calculator"
            await by_name(tools)["keep"].call({"text": text}, {})
            return await by_name(tools)["keep"].call({"text": text}, {})

    try:
        assert list(await asyncio.gather(play("a"), play("b"))) == ["a a", "b b"]
    finally:
        await toolbox.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"command": ["/nonexistent/server"]},
            "MCP server '/nonexistent/server' cannot be reached for 0.2 s",
        ),
        (
            {"url": "http://127.0.0.1:9/mcp"},
            "MCP server http://127.0.0.1:9/mcp cannot be reached for 0.2 s",
        ),
        (
            {"url": "http://127.0.0.1:9/mcp", "api_key_file": "/nonexistent"},
            "cannot be reached for 0.2 s",
        ),
    ],
)
async def test_a_server_that_is_not_there(arguments: dict[str, Any], said: str) -> None:
    server = McpServer(McpConfig.model_validate({"kind": "mcp", "start_seconds": 0.2} | arguments))
    with pytest.raises(ToolUnavailable, match=said):
        await server.start()


async def test_a_server_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ToolUnavailable, match=r'pip install "counterpoint\[mcp\]"'):
        await McpServer(McpConfig(kind="mcp", command=["x"])).start()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"kind": "mcp"}, "either `command` or `url`"),
        ({"kind": "mcp", "command": ["x"], "url": "http://x"}, "either `command` or `url`"),
        ({"kind": "mcp", "url": "ftp://x"}, "expected http"),
        ({"kind": "mcp", "command": ["x"], "api_key_file": "k"}, "only a server with a `url`"),
        ({"kind": "hammer"}, "hammer"),
        ({"kind": "python", "sandbox": "off"}, "'namespaces' or 'none'"),
        ("nonexistent_module:f", "put the directory of nonexistent_module on PYTHONPATH"),
        ("math:nothing", "expected package.module:function"),
        ("math:pi", "which cannot be called"),
    ],
)
def test_tools_that_are_configured_wrongly(table: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Toolbox([table])


async def test_two_tools_of_one_name() -> None:
    toolbox = Toolbox(["calculator", {"kind": "calculator"}])
    with pytest.raises(ValueError, match="calculator: the name of two tools"):
        await toolbox.start()


def test_functions_by_import_path() -> None:
    toolbox = Toolbox(["counterpoint.environments.tools.built_in:calculate"])
    assert [tool.name for tool in toolbox.tools] == ["calculate"]
