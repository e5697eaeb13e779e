"""An MCP server for tests: `python a_server.py` talks on its standard streams, `python a_server.py PORT` streamable HTTP."""

from __future__ import annotations

import os
import sys
from typing import Any

from mcp.server.mcpserver import MCPServer

server: Any = MCPServer("a server")
kept: list[str] = []


@server.tool()
def add(left: int, right: int) -> int:
    """Adds two numbers."""
    return left + right


@server.tool()
def keep(text: str) -> str:
    """Keeps a text, and returns all that were kept in this process."""
    kept.append(text)
    return " ".join(kept)


@server.tool()
def fail() -> None:
    """Raises."""
    raise RuntimeError("the tool broke")


@server.tool()
def die() -> None:
    """Ends the server."""
    os._exit(1)


@server.tool()
def flood() -> str:
    """Returns two million characters."""
    return "x" * (2 << 20)


if __name__ == "__main__":
    print("a server on standard error", file=sys.stderr)
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run(transport="stdio")
