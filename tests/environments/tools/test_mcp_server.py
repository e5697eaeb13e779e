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
from counterpoint.environments.tools.definition import ToolError, ToolFunction, ToolResult, ToolUnavailable
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


@pytest.mark.slow
async def test_each_part_of_an_answer_reaches_the_model_once() -> None:
    command = [sys.executable, str(SERVER.with_name("an_answering_server.py"))]
    server = McpServer(McpConfig(kind="mcp", command=command, start_seconds=200))
    await server.start()
    try:
        said = {}
        for tool in server.tools:
            try:
                said[tool.name] = await tool.call({}, {})
            except ToolError as error:
                said[tool.name] = f"error: {error}"
        assert said["worth"] == "well done", "nobody has said that its rewards count"
        server.config = server.config.model_copy(update={"rewards": True})
        said["worth"] = await by_name(server.tools)["worth"].call({}, {})
    finally:
        await server.close()
    assert said == {
        "nothing": "",
        "structured": '{"city": "Köln", "ok": true}',
        "same": '{"b": [1, {"c": null}],\n "a": 2.0}',
        "one_is_not_true": '{"a": 1}\n{"a": true}',
        "summary": 'Found 2.\n{"found": ["x", "y"]}',
        "file": "Here:\n[resource file:///a.csv]\na,b\n1,2\n[resource file:///a.bin (application/zip), which is no text]",
        "file_as_bytes": "[resource file:///a.csv]\né,1\n[resource file:///a.json (application/json), which is no text]",
        "media": "[image (image/png), which is no text]\n[audio (audio/wav), which is no text]",
        "link": "[link to db://7: Row 7 (text/plain) the 7th]",
        "failure": 'error: {"code": 17, "reason": "full"}',
        "failure_with_file": "error: [resource log://1]\ndisk is full",
        "worth": ToolResult("well done", 0.5),
        "silent_failure": "error: the tool failed, and said nothing",
        "number": "41",
        "word": "41",
        "words": "a\n2",
        "nested": '1\n2\n3\n{"result": [[1, 2], [3]]}',
        "mapping": '{\n  "x": 0.5\n}',
    }


WRONG_ANSWERS = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    method, params = asked["method"], asked.get("params") or {}
    if method == "initialize":
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}}
        result["serverInfo"] = {"name": "wrong", "version": "1"}
    elif method == "tools/list":
        schema, needs = {"type": "object"}, {"type": "object", "required": ["a"]}
        names = {"video": None, "bare": needs, "other": needs, "right": needs}
        result = {"tools": [{"name": n, "inputSchema": schema} | ({"outputSchema": o} if o else {}) for n, o in names.items()]}
    elif method == "tools/call":
        text = [{"type": "text", "text": "here"}]
        result = {
            "video": {"content": [{"type": "video", "data": "AAEC"}]},
            "bare": {"content": text},
            "other": {"content": text, "structuredContent": {"b": 1}},
            "right": {"content": text, "structuredContent": {"a": 1}},
        }[params["name"]]
    else:
        if "id" in asked:
            error = {"code": -32601, "message": "no such method"}
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


@pytest.mark.slow
async def test_an_answer_that_is_none_fails_its_rollout_and_keeps_the_connection() -> None:
    server = McpServer(McpConfig(kind="mcp", command=[sys.executable, "-c", WRONG_ANSWERS], start_seconds=200))
    await server.start()
    try:
        tools = by_name(server.tools)
        for name in ("video", "bare", "other"):
            with pytest.raises(ToolUnavailable, match=f"its answer to a call of '{name}'"):
                await tools[name].call({}, {})
        assert await tools["right"].call({}, {}) == 'here\n{"a": 1}'
    finally:
        await server.close()


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


@pytest.mark.parametrize("tools", ["calculator", {"kind": "calculator"}])
def test_tools_are_a_list(tools: Any) -> None:
    with pytest.raises(ValueError, match=r"tools = .*calculator.*; expected a list"):
        Toolbox(tools)


async def test_two_tools_of_one_name() -> None:
    toolbox = Toolbox(["calculator", {"kind": "calculator"}])
    with pytest.raises(ValueError, match="calculator: the name of two tools"):
        await toolbox.start()


def test_functions_by_import_path() -> None:
    toolbox = Toolbox(["counterpoint.environments.tools.built_in:calculate"])
    assert [tool.name for tool in toolbox.tools] == ["calculate"]
