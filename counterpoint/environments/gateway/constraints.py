"""Constrained answers: JSON mode, JSON schemas, and calls of tools that a request demands.

Each becomes one JSON schema, by which the server restricts every token. Schemas are the agent's, and so hostile: a server
compiles them, and a schema that takes it long would hold up everybody's rollouts. Keys that no server holds are refused, too
(`docs/gateway.md` has each key), and an answer that ended is compared with its schema (`check_kept`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from counterpoint.environments.base import Reply, ToolCall
from counterpoint.environments.chat import Tool
from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.messages import is_deep, json_of, shown
from counterpoint.environments.sampling import LONGEST_SCHEMA
from counterpoint.environments.tools.schema import check_schema, violation
from counterpoint.transport.exact_json import JsonError, dumps, loads

MOST_CHARACTERS = 256
"""The largest `minLength` and `maxLength`: a text of at most 256 takes xgrammar 0.3 s, one of 1000 0.7 s, at 20,000 tokens."""
MOST_CHARACTERS_IN_ALL = 1024
"""Together: texts of unlike lengths take as long as one of all their lengths, of like ones little more than one of them."""
MOST_COUNTED = 10_000
"""The largest `minItems` and the like."""
_COUNTS = {"minLength": MOST_CHARACTERS, "maxLength": MOST_CHARACTERS} | dict.fromkeys(
    ("minItems", "maxItems", "minContains", "maxContains", "minProperties", "maxProperties"), MOST_COUNTED
)
_EXPRESSIONS = ("pattern", "patternProperties")
"""Regular expressions: few characters of one may take any time."""
_NOT_HELD = frozenset(
    {
        "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains", "dependencies", "dependentRequired",
        "dependentSchemas", "disallow", "divisibleBy", "else", "extends", "if", "maxContains", "minContains", "not", "nullable",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "x-guidance",
    }
)  # fmt: skip
"""What llguidance 1.7, by which our servers constrain, refuses, or does not read. `x-guidance` would turn its refusals off."""
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
"""The values of `format` that it holds."""
_BY_NAME = ("properties", "$defs", "definitions", "dependentSchemas")
"""Keys of a schema whose object has names of the author's, and schemas below them."""
_DATA = ("const", "enum", "default", "examples")
"""Keys whose value is no schema."""


def response_schema(response_format: object) -> str:
    """Returns the JSON schema that a `response_format` demands, as text; empty for text. Raises `GatewayRefused`."""
    name = "response_format"
    if response_format is None:
        return ""
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    if isinstance(response_format, dict) and kind == "text":
        return ""
    if isinstance(response_format, dict) and kind == "json_object":
        return '{"type":"object"}'
    if not isinstance(response_format, dict) or kind != "json_schema":
        raise GatewayRefused(
            f"{name} is {shown(kind)}; expected the type text, json_object or json_schema", parameter=name
        )
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    return checked_schema(schema, f"{name}.json_schema.schema")


def demanded_tools(tool_choice: object, tools: Sequence[Tool]) -> list[Tool]:
    """Returns the tools one of which must be called; none where the model is free. Raises `GatewayRefused`."""
    if tool_choice in (None, "auto", "none"):
        return []
    if tool_choice == "required" and tools:
        return list(tools)
    function = tool_choice.get("function") if isinstance(tool_choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    found = [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        expected = "auto, none, required (with tools), or a function of tools by its name"
        raise GatewayRefused(
            f"tool_choice is {shown(name or tool_choice)}; expected {expected}", parameter="tool_choice"
        )
    return found


def calls_schema(tools: Sequence[Tool], *, parallel: bool) -> str:
    """Returns the schema of a list of calls of these tools: `[{"name": ..., "parameters": {...}}]`. Raises `GatewayRefused`."""
    definitions: dict[str, Any] = {}
    kinds = []
    for tool in tools:
        function = tool["function"]
        parameters = dict(function.get("parameters") or {"type": "object"})
        for key in ("$defs", "definitions"):  # references to them begin at the whole schema
            if not isinstance(own := parameters.pop(key, None) or {}, dict):
                raise GatewayRefused(
                    f"{key} of {shown(function['name'])} is {shown(own)}; expected schemas by name", parameter="tools"
                )
            for name, value in own.items():
                if definitions.setdefault(key, {}).setdefault(name, value) != value:
                    raise GatewayRefused(f"two tools define {shown(name)} in {key}, and otherwise", parameter="tools")
        call = {"name": {"const": function["name"]}, "parameters": parameters}
        kinds.append(
            {"type": "object", "properties": call, "required": ["name", "parameters"], "additionalProperties": False}
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": kinds}, **definitions}
    text = checked_schema(schema if parallel else schema | {"maxItems": 1}, "tools")
    try:
        check_schema(schema)  # or the calls could not be compared with it
    except ValueError as error:
        raise GatewayRefused(f"tools: {error}", parameter="tools") from None
    return text


def read_demanded(text: str, tools: Sequence[Tool]) -> Reply:
    """Returns the calls that a text of `calls_schema` has. One that was cut is no JSON, and stays text."""
    calls, names = json_of(text), {tool["function"]["name"] for tool in tools}
    if not isinstance(calls, list) or not calls:
        return Reply(text, malformed="expected a list of calls as JSON")
    made = []
    for call in calls:
        if not isinstance(call, dict) or call.get("name") not in names or not isinstance(call.get("parameters"), dict):
            return Reply(text, malformed="expected calls with the name of a tool and its parameters")
        made.append(ToolCall(f"call_{secrets.token_hex(8)}", call["name"], call["parameters"]))
    return Reply("", calls=tuple(made))


def check_kept(text: str, schema: str) -> None:
    """Raises `GatewayRefused` for an answer that the model ended and its schema does not allow: the server did not constrain it.

    A stock server may read a schema otherwise. Names that are written with escapes, or twice, pass llguidance, too.
    """
    try:
        problem = violation(loads(text), loads(schema), where="it")
    except JsonError as error:
        problem = f"it is no JSON: {error}"
    except ValueError as error:
        problem = str(error)
    if problem:
        raise GatewayRefused(
            f"the model ended its answer, but the schema does not allow it: {problem}; ask again",
            status=502,
            code="constraint_not_held",
        )


def checked_schema(schema: object, where: str) -> str:
    """Returns a schema as text, if no server takes long over it. Raises `GatewayRefused`."""
    if not isinstance(schema, dict) or is_deep(schema):
        raise GatewayRefused(f"{where} is {shown(schema)}; expected a JSON schema", parameter=where)
    lengths = set[tuple[int, int]]()
    _check(schema, where, lengths)
    if (characters := sum(map(max, lengths))) > MOST_CHARACTERS_IN_ALL:
        raise GatewayRefused(
            f"{where} has texts of {len(lengths)} lengths, of {characters} characters together; at most "
            f"{MOST_CHARACTERS_IN_ALL} are taken: give them the same minLength and maxLength, or none",
            parameter=where,
        )
    text = dumps(schema).decode()
    if len(text) > LONGEST_SCHEMA:
        raise GatewayRefused(f"{where} has {len(text)} characters; at most {LONGEST_SCHEMA} are taken", parameter=where)
    return text


def _check(schema: object, where: str, lengths: set[tuple[int, int]]) -> None:
    """Raises `GatewayRefused` for a key of the schema, or of one within it, that may take a server long.

    Adds the `minLength` and `maxLength` of its texts to `lengths`.
    """
    if isinstance(schema, list):
        for each in schema:
            _check(each, where, lengths)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in _EXPRESSIONS:
            raise GatewayRefused(f"{where} has {key!r}; regular expressions are not taken", parameter=where)
        if key in _NOT_HELD:
            raise GatewayRefused(
                f"{where} has {key!r}, which no server holds; leave it out, and check it yourself", parameter=where
            )
        if key == "format" and value not in FORMATS:
            raise GatewayRefused(
                f"{where} has format = {shown(value)}; expected one of {', '.join(FORMATS)}", parameter=where
            )
        if key in _COUNTS and (type(value) is not int or not 0 <= value <= _COUNTS[key]):
            raise GatewayRefused(
                f"{where} has {key} = {shown(value)}; expected a whole number to {_COUNTS[key]}", parameter=where
            )
        if key == "$ref" and not (isinstance(value, str) and value.startswith("#")):
            raise GatewayRefused(
                f"{where} has $ref = {shown(value)}; expected one within the schema: #/$defs/NAME", parameter=where
            )
        if key in _BY_NAME and isinstance(value, dict):
            for each in value.values():
                _check(each, where, lengths)
        elif key not in _DATA:
            _check(value, where, lengths)
    lengths.add((schema.get("minLength", 0), schema.get("maxLength", 0)))
