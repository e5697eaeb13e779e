"""An MCP server whose tools answer in every form that the protocol has: `python an_answering_server.py`."""

from __future__ import annotations

from typing import Any

import mcp_types as types
from mcp.server.mcpserver import MCPServer

server: Any = MCPServer("answers")


def answer(*blocks: Any, structured: Any = None, is_error: bool = False) -> types.CallToolResult:
    return types.CallToolResult(content=list(blocks), structured_content=structured, is_error=is_error)


def text(said: str) -> types.TextContent:
    return types.TextContent(type="text", text=said)


def resource(held: Any) -> types.EmbeddedResource:
    return types.EmbeddedResource(type="resource", resource=held)


ANSWERS: dict[str, types.CallToolResult] = {
    "nothing": answer(),
    "structured": answer(structured={"city": "Köln", "ok": True}),
    "same": answer(text('{"b": [1, {"c": null}],\n "a": 2.0}'), structured={"a": 2.0, "b": [1, {"c": None}]}),
    "one_is_not_true": answer(text('{"a": 1}'), structured={"a": True}),
    "summary": answer(text("Found 2."), structured={"found": ["x", "y"]}),
    "file": answer(
        text("Here:"),
        resource(types.TextResourceContents(uri="file:///a.csv", mime_type="text/csv", text="a,b\n1,2")),
        resource(types.BlobResourceContents(uri="file:///a.bin", mime_type="application/zip", blob="AAEC")),
    ),
    "file_as_bytes": answer(
        resource(types.BlobResourceContents(uri="file:///a.csv", mime_type="text/csv; charset=utf-8", blob="w6ksMQ==")),
        resource(types.BlobResourceContents(uri="file:///a.json", mime_type="application/json", blob="/w==")),
    ),
    "media": answer(
        types.ImageContent(type="image", data="AAEC", mime_type="image/png"),
        types.AudioContent(type="audio", data="AAEC", mime_type="audio/wav"),
    ),
    "link": answer(
        types.ResourceLink(
            type="resource_link",
            uri="db://7",
            name="seven",
            title="Row 7",
            mime_type="text/plain",
            description="the 7th",
        )
    ),
    "failure": answer(structured={"code": 17, "reason": "full"}, is_error=True),
    "failure_with_file": answer(
        resource(types.TextResourceContents(uri="log://1", text="disk is full")), is_error=True
    ),
    "silent_failure": answer(is_error=True),
    "worth": types.CallToolResult(content=[text("well done")], _meta={"counterpoint/reward": 0.5}),
}


def answers_with(made: types.CallToolResult) -> Any:
    def tool() -> types.CallToolResult:
        return made

    return tool


for name, made in ANSWERS.items():
    server.add_tool(answers_with(made), name=name)


@server.tool()
def number() -> int:
    """What is no object is structured as {"result": ...}."""
    return 41


@server.tool()
def word() -> str:
    """A text that is JSON, too."""
    return "41"


@server.tool()
def words() -> list[str]:
    """A block for each."""
    return ["a", "2"]


@server.tool()
def nested() -> list[list[int]]:
    """The blocks do not say which numbers belong together."""
    return [[1, 2], [3]]


@server.tool()
def mapping() -> dict[str, float]:
    """An object."""
    return {"x": 0.5}


if __name__ == "__main__":
    server.run(transport="stdio")
