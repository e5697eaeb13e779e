"""Checks the calls that a parser found in a turn against the tools: names, JSON, and the JSON schema of the arguments.

What is wrong becomes a text for the model to read (`Reply.malformed`), never an exception: it is the model's mistake. Of schemas,
`schema.py` says which keys are held.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from counterpoint.environments.base import Reply, ToolCall
from counterpoint.environments.chat import Tool
from counterpoint.environments.tools.schema import violation

MAX_CALLS = 64
"""Calls of one turn."""

MAX_ARGUMENT_CHARACTERS = 1 << 20


def read_calls(
    found: Sequence[tuple[str, str]],
    tools: Sequence[Tool],
    new_id: Callable[[], str],
    content: str = "",
    reasoning: str = "",
    malformed: str = "",
    cut: str = "",
) -> Reply:
    """Returns the reply whose calls are `found` (name and arguments as JSON), as far as they are valid.

    One call that is not makes none of them count: a model must not see half of what it asked for done. `malformed` is what the
    parser itself complains about. `cut` is what a model is told of a turn that was cut: its calls, which were complete by then,
    count nevertheless. Raises `ValueError` for a tool whose schema cannot be held.
    """
    if len(found) > MAX_CALLS:
        return Reply(content, reasoning, malformed=f"{len(found)} calls in one turn; at most {MAX_CALLS} are allowed")
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    calls: list[ToolCall] = []
    wrong = [malformed] if malformed and not (cut and found) else []
    for name, arguments in found:
        value, problem = _arguments(name, arguments, schemas)
        if problem:
            wrong.append(problem)
        else:
            calls.append(ToolCall(new_id(), name, value))
    if wrong:
        return Reply(content, reasoning, malformed="\n".join([*wrong, cut] if cut else wrong))
    return Reply(content, reasoning, tuple(calls), cut)


def _arguments(name: str, arguments: str, schemas: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the arguments, and what is wrong with the call; empty if nothing is."""
    if name not in schemas:
        return {}, f"there is no tool {_short(name)}; the tools are {', '.join(schemas) or 'none'}"
    if len(arguments) > MAX_ARGUMENT_CHARACTERS:
        return (
            {},
            f"{name}: its arguments have {len(arguments)} characters; at most {MAX_ARGUMENT_CHARACTERS} are allowed",
        )
    try:
        value = json.loads(arguments or "{}", parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return {}, f"{name}: its arguments hold half a character: a surrogate without its other half"
    except (ValueError, RecursionError) as error:
        return {}, f"{name}: its arguments are not JSON: {str(error)[:200]}"
    if not isinstance(value, dict):
        return {}, f"{name}: its arguments must be an object, and are {_short(value)}"
    try:
        problem = violation(value, schemas[name])
    except ValueError as error:
        raise ValueError(f"tool {name!r}: its parameters: {error}") from None
    return value, f"{name}: {problem}" if problem else ""


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _short(value: Any) -> str:
    return reprlib.repr(value) if not isinstance(value, str) else json.dumps(value[:64])
