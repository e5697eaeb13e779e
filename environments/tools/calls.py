"""Checks the calls that a parser found in a turn against the tools: names, JSON, and the JSON schema of the arguments.

What is wrong becomes a text for the model to read (`Reply.malformed`), never an exception: it is the model's mistake. The check
covers what schemas of tools use: type, enum, const, required, properties, additionalProperties, items, prefixItems, anyOf, oneOf,
allOf, local references, and bounds of numbers and lengths. A keyword that it does not know accepts everything; `pattern` is not
checked, since a pattern on text that a model wrote may never end.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from counterpoint.environments.base import Reply, ToolCall
from counterpoint.environments.chat import Tool

MAX_CALLS = 64
"""Calls of one turn."""

MAX_ARGUMENT_CHARACTERS = 1 << 20
MAX_DEPTH = 32
"""The depth of nested values and schemas."""

MAX_CHECKS = 100_000
"""Checks of a value by a schema: a schema that refers to itself several times would take years."""


@dataclass(slots=True)
class _Root:
    """What references of a schema point into, and how many checks may still be made."""

    schema: Any
    left: int = MAX_CHECKS


_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: (
        (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
    ),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "null": lambda value: value is None,
}


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
    count nevertheless.
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
    return value, "".join(f"{name}: {problem}" for problem in [violation(value, schemas[name])] if problem)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def violation(value: Any, schema: Any, root: _Root | None = None, where: str = "arguments", depth: int = 0) -> str:
    """Returns what in `value` is not as `schema` wants it, for a model to read; empty if nothing is."""
    root = root or _Root(schema)
    root.left -= 1
    if root.left < 0:
        return f"{where}: takes more than {MAX_CHECKS} checks"
    if depth > MAX_DEPTH:
        return f"{where}: nested deeper than {MAX_DEPTH} levels"
    if schema is False:
        return f"{where}: not allowed"
    if not isinstance(schema, Mapping):
        return ""
    if (reference := schema.get("$ref")) is not None:
        return violation(value, _resolve(reference, root.schema), root, where, depth + 1)
    return (
        _wrong_type(value, schema, where)
        or _wrong_value(value, schema, where)
        or _wrong_bounds(value, schema, where)
        or _wrong_choice(value, schema, root, where, depth)
        or _wrong_parts(value, schema, root, where, depth)
    )


def _resolve(reference: Any, root: Any) -> Any:
    """Returns the part of the schema that a local reference names; one that accepts everything if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return {}
    found = root
    for part in reference[1:].strip("/").split("/") if reference != "#" else ():
        found = found.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(found, Mapping) else {}
    return found


def _wrong_type(value: Any, schema: Mapping[str, Any], where: str) -> str:
    named = schema.get("type")
    kinds = [kind for kind in (named if isinstance(named, list) else [named]) if kind in _TYPES]
    if not kinds or any(_TYPES[kind](value) for kind in kinds):
        return ""
    return f"{where}: expected {' or '.join(kinds)}, not {_short(value)}"


def _wrong_value(value: Any, schema: Mapping[str, Any], where: str) -> str:
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    # JSON tells 1 and true apart, Python does not.
    if not isinstance(allowed, list) or any(value == each and type(value) is type(each) for each in allowed):
        return ""
    return f"{where}: expected one of {', '.join(map(_short, allowed[:20]))}, not {_short(value)}"


def _wrong_bounds(value: Any, schema: Mapping[str, Any], where: str) -> str:
    if _TYPES["number"](value):
        return _outside(value, schema, where, "minimum", "maximum", "", strict=False) or _outside(
            value, schema, where, "exclusiveMinimum", "exclusiveMaximum", "", strict=True
        )
    for kind, least, most, noun in (
        (str, "minLength", "maxLength", "characters"),
        (list, "minItems", "maxItems", "items"),
        (dict, "minProperties", "maxProperties", "keys"),
    ):
        if isinstance(value, kind):
            return _outside(len(value), schema, where, least, most, noun, strict=False)
    return ""


def _outside(
    number: float, schema: Mapping[str, Any], where: str, least: str, most: str, noun: str, *, strict: bool
) -> str:
    low, high = schema.get(least), schema.get(most)
    unit = f" {noun}" if noun else ""
    if isinstance(low, int | float) and (number < low or (strict and number == low)):
        return f"{where}: {number}{unit}; expected {'more than' if strict else 'at least'} {low}"
    if isinstance(high, int | float) and (number > high or (strict and number == high)):
        return f"{where}: {number}{unit}; expected {'less than' if strict else 'at most'} {high}"
    return ""


def _wrong_choice(value: Any, schema: Mapping[str, Any], root: _Root, where: str, depth: int) -> str:
    for part in _list(schema.get("allOf")):
        if problem := violation(value, part, root, where, depth + 1):
            return problem
    for keyword in ("anyOf", "oneOf"):
        if parts := _list(schema.get(keyword)):
            problems = [violation(value, part, root, where, depth + 1) for part in parts]
            if all(problems):
                return problems[0] if len(problems) == 1 else f"{where}: fits none of: {'; '.join(problems)[:500]}"
    return ""


def _wrong_parts(value: Any, schema: Mapping[str, Any], root: _Root, where: str, depth: int) -> str:
    if isinstance(value, list):
        items, first = schema.get("items", {}), _list(schema.get("prefixItems"))
        if isinstance(items, list):  # as drafts before 2020 have it
            items, first = schema.get("additionalItems", {}), items
        problems = (
            violation(each, first[index] if index < len(first) else items, root, f"{where}[{index}]", depth + 1)
            for index, each in enumerate(value)
        )
        return next(filter(None, problems), "")
    if not isinstance(value, dict):
        return ""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    if missing := [key for key in _list(schema.get("required")) if key not in value]:
        return f"{where}: {', '.join(map(str, missing))} missing"
    others = schema.get("additionalProperties", {})
    for key, each in value.items():
        if key not in properties and others is False:
            return f"{where}: there is no {_short(key)}; expected {', '.join(properties) or 'nothing'}"
        if problem := violation(each, properties.get(key, others), root, f"{where}.{key[:64]}", depth + 1):
            return problem
    return ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _short(value: Any) -> str:
    return reprlib.repr(value) if not isinstance(value, str) else json.dumps(value[:64])
