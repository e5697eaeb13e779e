"""The tools that a configuration names: built in, typed functions by import path, MCP servers. Starts and closes what they need.

tools = ["calculator", "my_tasks:search", { kind = "python", seconds = 5 }, { kind = "mcp", command = ["uvx", "a-server"] }]
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from counterpoint.environments.import_path import check_allowed, import_advice, import_module
from counterpoint.environments.sandbox.python_sandbox import LEAST_MEMORY_MIB, Sandbox, SandboxUnavailable
from counterpoint.environments.tools.built_in import calculator_tool, python_tool
from counterpoint.environments.tools.definition import ToolFunction, ToolUnavailable, tool_from
from counterpoint.environments.tools.mcp_server import McpConfig, McpServer
from counterpoint.transport.config import Config


class CalculatorConfig(Config):
    """Safe arithmetic."""

    kind: Literal["calculator"]
    """The name of this kind of tool."""

    name: str = "calculator"
    """The name by which the model calls it."""


class PythonConfig(Config):
    """Runs programs in the sandbox."""

    kind: Literal["python"]
    """The name of this kind of tool."""

    name: str = "python"
    """The name by which the model calls it."""

    sandbox: Literal["namespaces", "none"] = "namespaces"
    """`none` runs what the model wrote without any protection of this machine."""

    seconds: float = Field(default=10.0, gt=0, le=3600)
    """Deadline of one program."""

    memory_mib: int = Field(default=512, ge=LEAST_MEMORY_MIB)
    """Memory of one program."""

    at_once: int | None = Field(default=None, ge=1)
    """Programs that run at the same time. Unset: one for each core."""

    packages: list[Path] = []
    """Directories whose modules programs may import, besides Python's own library."""


class ToolFunctionConfig(Config):
    """A typed function of the operator's."""

    kind: Literal["function"]
    """The name of this kind of tool."""

    function: str
    """Import path, `package.module:function`."""

    name: str | None = None
    """The name by which the model calls it. Unset: the function's name."""


ToolConfig = Annotated[CalculatorConfig | PythonConfig | ToolFunctionConfig | McpConfig, Field(discriminator="kind")]
_ADAPTER: TypeAdapter[list[Any]] = TypeAdapter(list[ToolConfig])


class Toolbox:
    """The tools of `configs`, and the sandbox and servers behind them."""

    def __init__(self, configs: Sequence[str | dict[str, Any]]) -> None:
        """A name stands for a table with that `kind`, an import path for a function. Raises `ValueError`, naming the tool."""
        if isinstance(configs, str | Mapping):
            raise ValueError(f'tools = {configs!r}; expected a list, such as tools = ["calculator"]')
        tables = [_as_table(each) for each in configs]
        try:
            self._configs = _ADAPTER.validate_python(tables)
        except ValidationError as error:
            raise ValueError(f"tools: {error}") from error
        self._resources: list[Sandbox | McpServer] = []
        self._fixed: list[ToolFunction] = []
        self._directory: Path | None = None
        for config in self._configs:
            match config:
                case CalculatorConfig():
                    self._fixed.append(calculator_tool(config.name))
                case PythonConfig():
                    sandbox = Sandbox(config.sandbox, at_once=config.at_once, packages=config.packages)
                    self._resources.append(sandbox)
                    self._fixed.append(python_tool(sandbox, config.seconds, config.memory_mib, config.name))
                case ToolFunctionConfig():
                    self._fixed.append(tool_from(_load(config.function), config.name))
                case McpConfig():
                    self._resources.append(McpServer(config))

    @property
    def tools(self) -> list[ToolFunction]:
        """Returns the tools. Those of MCP servers are known once it is started."""
        return [*self._fixed, *(tool for each in self._servers for tool in each.tools)]

    @property
    def may_reward(self) -> bool:
        """Whether a call may give its turn a reward: one of a server with `rewards`, or of a function not annotated `-> str`."""
        return any(server.config.rewards for server in self._servers) or any(
            getattr(_load(config.function), "__annotations__", {}).get("return") not in (str, "str")
            for config in self._configs
            if isinstance(config, ToolFunctionConfig)
        )

    @property
    def _servers(self) -> list[McpServer]:
        return [each for each in self._resources if isinstance(each, McpServer)]

    async def start(self, directory: Path | None = None) -> None:
        """Starts the sandbox and the servers, whose logs go to `directory`.

        Raises `ToolUnavailable` or `ValueError`, naming the one that does not start.
        """
        self._directory = directory
        for resource in self._resources:
            try:
                await (resource.start() if isinstance(resource, Sandbox) else resource.start(directory))
            except SandboxUnavailable as error:
                raise ToolUnavailable(str(error)) from error
        names = [tool.name for tool in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"tools: {', '.join(twice)}: the name of two tools; give a server a `prefix`, or a tool a `name`"
            )

    @asynccontextmanager
    async def for_rollout(self) -> AsyncIterator[list[ToolFunction]]:
        """Gives the tools of one rollout, with the sessions that are its own, which end with it."""
        own = [McpServer(each.config) for each in self._servers if each.config.session == "rollout"]
        if not own:
            yield self.tools
            return
        shared = [tool for each in self._servers if each.config.session == "shared" for tool in each.tools]
        try:
            for server in own:
                await server.start(self._directory)
            yield [*self._fixed, *shared, *(tool for server in own for tool in server.tools)]
        finally:
            for server in own:
                await server.close()

    async def close(self) -> None:
        """Ends all tools."""
        for resource in self._resources:
            await resource.close()


def _as_table(config: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(config, str):
        return {"kind": "function", "function": config} if ":" in config else {"kind": config}
    return config


def _load(path: str) -> Any:
    module_name, _, name = path.partition(":")
    check_allowed(path, "tools: function")
    try:
        found = getattr(import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        advice = import_advice(module_name, error) or "; expected package.module:function"
        raise ValueError(f"tools: function = {path!r}: {error}{advice}") from error
    if not callable(found):
        raise ValueError(f"tools: function = {path!r} is {found!r}, which cannot be called")
    return found
