"""A tool: its definition for the model's template, and the function that is called. `tool_from` makes one of a typed function.

    def add(left: int, right: int) -> int:
        \"\"\"Adds two numbers.

Args:
            left: the first.
            right: the second.
        \"\"\"
        return left + right

    add_tool = tool_from(add)

The signature becomes the JSON schema, the docstring the descriptions. A parameter named `state` gets the rollout's state and is
hidden from the model. `async` functions run on the event loop, others in threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import re
import threading
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from counterpoint.environments.chat import Tool
from counterpoint.environments.main_thread import NeedsMainThread, uses_signals
from counterpoint.environments.tools.schema import check_schema, with_parts

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
"""What the templates and parsers of the usual models take."""

MAX_THREADS = 64
"""Calls of functions that are not `async` at once. One that never returns keeps its thread, since no thread can be killed."""

_HIDDEN = "state"
_threads = threading.Semaphore(MAX_THREADS)


class ToolError(Exception):
    """A call that failed in a way that its message tells the model. Tools may raise it; so may they any other exception."""


class ToolUnavailable(Exception):
    """A tool that cannot work: its server is gone, or this machine refuses it. It fails the rollout."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool returns to give the turn that called it a reward."""

    content: Any
    """What the model reads, as if the tool had returned it alone."""
    reward: float
    """The reward of this call. A turn gets the sum over its calls."""


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A tool and how it is called."""

    definition: Tool
    """The definition as `Chat.start` takes it."""
    call: Callable[[dict[str, Any], dict[str, Any]], Awaitable[Any]]
    """The function that takes the arguments and the rollout's state. Returns text, anything that JSON can say, or either in a
    `ToolResult`."""

    @property
    def name(self) -> str:
        """The name as the model writes it."""
        return str(self.definition["function"]["name"])


def make_definition(name: str, description: str, parameters: Mapping[str, Any]) -> Tool:
    """Returns the definition of a tool, in OpenAI's form.

    Raises `ValueError` for a name that models cannot write, and for a schema that cannot be held.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"tool {name!r}: expected a name of letters, digits, '_', '.' and '-', at most 64")
    try:
        check_schema(parameters)
    except ValueError as error:
        raise ValueError(f"tool {name!r}: its parameters: {error}") from None
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": dict(parameters)},
    }


def tool_from(function: Callable[..., Any], name: str | None = None) -> ToolFunction:
    """Returns a function as a tool. Raises `ValueError` for one that cannot be called with named, typed arguments."""
    name = name or function.__name__
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.name != _HIDDEN]
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ValueError(f"tool {name!r}: its annotations cannot be read: {error}") from error
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool {name!r}: {parameter} cannot be given by name")
        if parameter.name not in hints:
            raise ValueError(f"tool {name!r}: parameter {parameter.name!r} has no annotation, so it has no schema")
    description, described = _read_docstring(inspect.getdoc(function) or "")
    adapter = _adapter(parameters, hints)
    schema = without_titles(adapter.json_schema())
    for argument, text in described.items():
        if argument in schema.get("properties", {}):
            schema["properties"][argument].setdefault("description", text)
    is_async, takes_state = inspect.iscoroutinefunction(function), _HIDDEN in signature.parameters
    if not is_async:
        try:
            uses_signals([function], "a tool that is no `async def` runs in a thread")
        except NeedsMainThread as error:
            raise ValueError(f"tool {name!r}: {error}") from error

    async def call(arguments: dict[str, Any], state: dict[str, Any]) -> Any:
        try:
            given = dict(adapter.validator.validate_python(ArgsKwargs((), arguments)))
        except ValidationError as error:
            raise ToolError(_explain(error)) from None
        if takes_state:
            given[_HIDDEN] = state
        return await (function(**given) if is_async else in_thread(lambda: function(**given), name))

    return ToolFunction(make_definition(name, description, schema), call)


def _adapter(parameters: list[inspect.Parameter], hints: dict[str, Any]) -> TypeAdapter[Any]:
    """Returns what checks the arguments and returns them, converted, by name."""

    def named(**arguments: Any) -> dict[str, Any]:
        return arguments

    named.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    )
    named.__annotations__ = {each.name: hints[each.name] for each in parameters}
    checked: Any = named
    return TypeAdapter(checked)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns the description, and that of each parameter in an `Args:` section."""
    before, _, after = text.partition("\nArgs:\n")
    described: dict[str, str] = {}
    current = ""
    for line in after.splitlines():
        if line and not line.startswith(" "):
            break
        if found := re.fullmatch(r" {4}(\w+)(?: \([^)]*\))?: (.*)", line):
            current, described[found[1]] = found[1], found[2]
        elif current and line.strip():
            described[current] += " " + line.strip()
    description = re.split(r"\n(?:Returns|Raises|Yields):\n", before)[0]
    return re.sub(r"(?<!\n)\n(?!\n)", " ", description).strip(), described


def without_titles(schema: Any) -> Any:
    """Returns a schema without the titles that pydantic adds, which only cost tokens."""
    if isinstance(schema, dict):
        schema = {key: value for key, value in schema.items() if key != "title"}
    return with_parts(schema, without_titles)


def _explain(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5])


async def in_thread(function: Callable[[], Any], name: str) -> Any:
    """Calls a function in a thread of its own, which a cancelled call leaves behind.

    It does not use the loop's threads: a few functions that hang would take all of those, and then nothing else could use them.
    """
    if not _threads.acquire(blocking=False):
        raise ToolError(f"{MAX_THREADS} calls of tools are under way or hang")
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if outcome.done():  # its caller was cancelled
            return
        if error is None:
            outcome.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            outcome.set_exception(error)
        else:
            outcome.set_exception(ToolError(repr(error)))

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(function)
        except BaseException as caught:  # noqa: BLE001 - passed on to the caller
            error = caught
        finally:
            _threads.release()
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # The loop is closed: nobody waits any more.

    threading.Thread(target=run, name=f"tool {name}", daemon=True).start()
    return await outcome


def as_text(value: Any) -> str:
    """Returns what a tool returned as the model reads it."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
