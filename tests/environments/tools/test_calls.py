"""Calls are checked against the tools' schemas; whatever is wrong is said to the model and raises nothing."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.environments.base import Reply, ToolCall
from counterpoint.environments.tools.calls import MAX_CALLS, read_calls, violation

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "maximum": 9}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
]


def read(*found: tuple[str, str], malformed: str = "") -> Reply:
    ids = itertools.count(1)
    return read_calls(found, TOOLS, lambda: f"call_{next(ids)}", "text", "thought", malformed)


def test_valid_calls() -> None:
    assert read(("add", f'{{"a": {2**70 + 1}}}')).calls == (ToolCall("call_1", "add", {"a": 2**70 + 1}),)
    reply = read(("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3.0}'))
    assert reply == Reply(
        "text", "thought", (ToolCall("call_1", "add", {"a": 1, "b": 2}), ToolCall("call_2", "add", {"a": 3.0}))
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([("sub", "{}")], 'there is no tool "sub"; the tools are add'),
        ([("add", "{")], "add: its arguments are not JSON"),
        ([("add", '{"a": NaN}')], "NaN is not JSON"),
        ([("add", '{"a": 1, "b": 1e400}')], "add: its arguments are not JSON"),
        ([("add", '{"a": %s}' % ("9" * 5000))], "add: its arguments are not JSON"),
        ([("add", "[1]")], "add: its arguments must be an object"),
        ([("add", '{"b": 1}')], "add: arguments: a missing"),
        ([("add", '{"a": "1"}')], 'add: arguments.a: expected integer, not "1"'),
        ([("add", '{"a": true}')], "expected integer"),
        ([("add", '{"a": 1, "b": 10}')], "arguments.b: 10; expected at most 9"),
        ([("add", '{"a": 1, "c": 10}')], 'there is no "c"; expected a, b'),
        ([("add", "[" * 100_000)], "not JSON"),
        ([("add", '{"a": "\\ud800"}')], "add: its arguments hold half a character"),
        ([("add", '{"\\udfff": 1}')], "add: its arguments hold half a character"),
        ([("add", '{"a": 1}'), ("add", "?")], "not JSON"),
        ([("add", '{"a": 1}')] * (MAX_CALLS + 1), "65 calls in one turn"),
    ],
)
def test_invalid_calls(found: list[tuple[str, str]], said: str) -> None:
    reply = read(*found)
    assert reply.calls == ()
    assert said in reply.malformed


def test_what_the_parser_complains_about_is_kept() -> None:
    assert read(malformed="half a call").malformed == "half a call"


SCHEMAS: list[dict[str, Any]] = [
    {"type": ["integer", "null"]},
    {"enum": [1, "a", None, True]},
    {"const": 2},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 1, "exclusiveMaximum": 3}]},
    {"allOf": [{"type": "array"}, {"maxItems": 2}], "items": {"type": "integer"}},
    {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/T"}},
        "required": ["a"],
        "$defs": {"T": {"type": "integer"}},
    },
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
    {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
    {"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    {"prefixItems": [{"type": "integer"}], "items": {"type": "null"}, "minItems": 1},
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "abc"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=80)
@given(schema=st.sampled_from(SCHEMAS), value=VALUES)
def test_the_check_agrees_with_jsonschema(schema: dict[str, Any], value: Any) -> None:
    expected = jsonschema.Draft202012Validator(schema).is_valid(value)
    assert (violation(value, schema) == "") == expected, json.dumps([schema, value])


def test_a_schema_without_end_is_refused() -> None:
    assert "nested deeper" in violation(1, {"$ref": "#"})


def test_a_schema_that_multiplies_is_given_up() -> None:
    schema = {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 10}}}
    assert "fits none of" in violation({"a": 1}, schema)
    assert "takes more than" in violation([1] * 200_000, {"items": {"type": "integer"}})


@pytest.mark.parametrize("value", [[], [1], [1, "a"], ["a"], [1, 2]])
def test_items_of_older_drafts_are_read(value: Any) -> None:
    schema = {"items": [{"type": "integer"}], "additionalItems": {"type": "string"}}
    assert (violation(value, schema) == "") == jsonschema.Draft7Validator(schema).is_valid(value)
