"""The tools of an MCP server (extra `mcp`): a process that talks on its standard streams, or a streamable HTTP address.

One task owns the connection, as the library wants it, and opens it again, with growing pauses, when it is lost. A call that finds
no connection waits for one for a while; a call whose connection is lost is not repeated, since the server may have acted on it.
Both raise `ToolUnavailable`, which says which server and why. What the server itself answers as an error is told to the model.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator

from counterpoint.environments.chat import Tool
from counterpoint.environments.tools.definition import (
    ToolError,
    ToolFunction,
    ToolResult,
    ToolUnavailable,
    make_definition,
    without_titles,
)
from counterpoint.environments.tools.mcp_results import text_of
from counterpoint.environments.tools.schema import newest
from counterpoint.transport.config import Config
from counterpoint.transport.printable import clipped

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""Pauses between attempts to connect; doubled after each."""

CLOSE_SECONDS = 10.0
MAX_TOOLS = 256
MAX_PAGES = 64
MAX_SCHEMA_CHARACTERS = 1 << 16
MAX_DESCRIPTION_CHARACTERS = 4096
MAX_RESULT_CHARACTERS = 1 << 20
"""The length of one result. The rollout's limits bound what the model is told of it."""

MAX_TOKEN_BYTES = 4096

REWARD = "counterpoint/reward"
"""The key in `_meta` of a result under which a server gives the turn that called it a reward."""


class McpConfig(Config):
    """A server of the Model Context Protocol."""

    kind: Literal["mcp"]
    """All tools of a server."""

    command: list[str] = []
    """The server's program and its arguments, which talks on its standard streams. Or `url`."""

    environment: dict[str, str] = {}
    """Further environment variables of the program. It gets PATH, HOME and a few others, and nothing else of ours."""

    url: str | None = None
    """Address of a server that talks streamable HTTP. Or `command`."""

    api_key_file: Path | None = None
    """A file holding the bearer token to send to `url`."""

    tools: list[str] | None = None
    """Names of the server's tools to use. Unset: all."""

    prefix: str = ""
    """Put before each name, where two servers have the same."""

    session: Literal["shared", "rollout"] = "shared"
    """`rollout`: each rollout has a session (and a program) of its own, for servers that keep state."""

    rewards: bool = False
    """The server's results may give turns rewards (docs/rewards.md). Else those are not read: it is trusted with texts alone."""

    start_seconds: float = Field(default=60.0, gt=0)
    """How long it may take to connect, and how long a call waits for a lost connection to come back."""

    @model_validator(mode="after")
    def _one_address(self) -> McpConfig:
        if bool(self.command) == (self.url is not None):
            raise ValueError("kind = 'mcp' needs either `command` or `url`")
        if self.url is not None and urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError(f"url = {self.url!r}: expected http://... or https://...")
        if self.api_key_file is not None and self.url is None:
            raise ValueError("api_key_file: only a server with a `url` takes one")
        return self

    def describe(self) -> str:
        """Returns how messages name the server, without secrets."""
        if self.url is None:
            return f"MCP server {' '.join(self.command)!r}"
        parts = urlsplit(self.url)
        return f"MCP server {parts.scheme}://{parts.hostname}:{parts.port or ''}{parts.path}"


class McpServer:
    """A connection to the server of `config`."""

    def __init__(self, config: McpConfig) -> None:
        self.config = config
        self.tools: list[ToolFunction] = []
        """The server's tools, known once it is started."""
        self._client: Any = None
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()
        self._problem = "not connected yet"
        self._owner: asyncio.Task[None] | None = None
        self._log: Path | None = None

    async def start(self, directory: Path | None = None) -> None:
        """Connects, and reads the list of tools. The program's standard error goes to a file in `directory`.

        Raises `ToolUnavailable`, naming the server, if it does not answer in time, or if the extra is not installed.
        """
        await asyncio.to_thread(_import_library)  # It takes a second.
        if directory is not None and self.config.command:
            await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
            self._log = directory / f"mcp_{re.sub(r'[^A-Za-z0-9]+', '_', self.config.command[0])[-40:]}.log"
        self._owner = asyncio.create_task(self._own(), name=f"connection to {self.config.describe()}")
        try:
            client = await self._wait()
            async with asyncio.timeout(self.config.start_seconds):
                listed = await _list_tools(client)
        except ToolUnavailable:
            await self.close()
            raise
        except Exception as error:  # the library's, the server's, or a deadline
            await self.close()
            raise ToolUnavailable(f"{self.config.describe()} does not list its tools: {error!r}") from error
        try:
            self.tools = self._functions(listed)
        except ValueError as error:
            await self.close()
            raise ToolUnavailable(f"{self.config.describe()}: {error}") from error

    async def close(self) -> None:
        """Ends the connection, and the program. Safe to call twice."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.cancel()
            await asyncio.wait([owner], timeout=CLOSE_SECONDS)

    async def _own(self) -> None:
        """Keeps the connection, in one task, as its library requires."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                async with self._open() as client:
                    self._client, pause = client, FIRST_PAUSE_SECONDS
                    self._lost.clear()
                    self._connected.set()
                    await self._lost.wait()
            except Exception as error:  # noqa: BLE001 - the library's, whose kinds are many, and groups of them
                self._problem = _describe(error)
            finally:
                self._client = None
                self._connected.clear()
            logger.warning("%s: %s; trying again in %g s", self.config.describe(), self._problem, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Any]:
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        config = self.config
        if config.url is not None:
            headers = {}
            if config.api_key_file is not None:
                headers["Authorization"] = f"Bearer {_read_token(config.api_key_file)}"
            async with (
                create_mcp_http_client(headers) as http,
                Client(streamable_http_client(config.url, http_client=http)) as client,
            ):
                yield client
            return
        parameters = StdioServerParameters(command=config.command[0], args=config.command[1:], env=config.environment)
        with open(self._log or os.devnull, "a", encoding="utf-8") as log:  # noqa: ASYNC230
            async with Client(stdio_client(parameters, errlog=log)) as client:
                yield client

    async def _wait(self) -> Any:
        """Returns the connection. Raises `ToolUnavailable` if there is none in time."""
        if self._owner is None:
            raise ToolUnavailable(f"{self.config.describe()} is not started")
        try:
            async with asyncio.timeout(self.config.start_seconds):
                await self._connected.wait()
        except TimeoutError:
            seconds = self.config.start_seconds
            raise ToolUnavailable(
                f"{self.config.describe()} cannot be reached for {seconds:g} s: {self._problem}"
            ) from None
        return self._client

    def _functions(self, listed: list[Any]) -> list[ToolFunction]:
        wanted = self.config.tools
        names = [each.name for each in listed]
        if missing := [name for name in wanted or () if name not in names]:
            raise ValueError(f"it has no tool {', '.join(missing)}; it has {', '.join(names) or 'none'}")
        chosen = [each for each in listed if wanted is None or each.name in wanted]
        return [self._function(each.name, _definition(each, self.config.prefix)) for each in chosen]

    def _function(self, name: str, definition: Tool) -> ToolFunction:
        async def call(arguments: dict[str, Any], state: dict[str, Any]) -> str | ToolResult:
            return await self._call(name, arguments)

        return ToolFunction(definition, call)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str | ToolResult:
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        client = await self._wait()
        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise ToolError(error.message) from error
            problem: Exception = error
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if self._client is client and isinstance(error, ValidationError | RuntimeError):
                raise ToolUnavailable(
                    f"{self.config.describe()}: its answer to a call of {name!r} is not as the protocol, or the tool's own "
                    f"output schema, wants it: {_describe(error)}"
                ) from error
            problem = error
        else:
            text = text_of(result)[:MAX_RESULT_CHARACTERS]
            if result.is_error:
                raise ToolError(text or "the tool failed, and said nothing")
            has_reward = self.config.rewards and result.meta is not None and REWARD in result.meta
            return ToolResult(text, result.meta[REWARD]) if has_reward else text
        if self._client is client:  # Further calls wait for the next connection.
            self._client, self._problem = None, _describe(problem)
            self._connected.clear()
            self._lost.set()
        raise ToolUnavailable(
            f"{self.config.describe()}: the connection was lost during a call of {name!r}: {_describe(problem)}"
        ) from problem


async def _list_tools(client: Any) -> list[Any]:
    listed: list[Any] = []
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        listed += page.tools
        cursor = page.next_cursor
        if len(listed) > MAX_TOOLS:
            raise ValueError(f"it lists more than {MAX_TOOLS} tools; choose some by `tools`")
        if cursor is None:
            return listed
    raise ValueError(f"its list of tools has more than {MAX_PAGES} pages")


def _definition(tool: Any, prefix: str) -> Tool:
    """Returns the definition of a server's tool. Raises `ValueError` if a model cannot be given it."""
    schema = tool.input_schema if isinstance(tool.input_schema, dict) else {}
    if len(str(schema)) > MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"the schema of its tool {tool.name!r} has more than {MAX_SCHEMA_CHARACTERS} characters")
    try:
        schema = newest(schema) if "$schema" in schema else schema
    except ValueError as error:
        raise ValueError(f"its tool {tool.name!r}: its parameters: {error}") from None
    # Templates read type and properties. Titles and addresses only cost tokens.
    parameters = {key: value for key, value in without_titles(schema).items() if key != "$id"}
    parameters["type"] = "object"
    if not isinstance(parameters.get("properties"), dict):
        parameters["properties"] = {}
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", prefix + tool.name)
    return make_definition(name, (tool.description or "")[:MAX_DESCRIPTION_CHARACTERS], parameters)


def _describe(error: BaseException) -> str:
    """Returns an error for a person; of a group, its first leaf."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return clipped(f"{type(error).__name__}: {error}", 500)


def _read_token(path: Path) -> str:
    with path.open("rb") as file:
        token = file.read(MAX_TOKEN_BYTES + 1).strip()
    if not token or len(token) > MAX_TOKEN_BYTES or not token.isascii() or b"\n" in token:
        raise ValueError(
            f"api_key_file = {str(path)!r}: one line of 1 to {MAX_TOKEN_BYTES} ASCII characters is expected"
        )
    return token.decode()


def _import_library() -> None:
    try:
        import mcp.client.streamable_http  # noqa: F401
    except ImportError as error:
        raise ToolUnavailable('MCP servers need the extra `mcp`: pip install "counterpoint[mcp]"') from error
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # It logs each request.
    logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)  # A traceback for each line that is no message.
