"""Calls are checked against the tools' schemas; whatever is wrong is said to the model and raises nothing."""

from __future__ import annotations

import itertools

import pytest

from counterpoint.environments.base import Reply, ToolCall
from counterpoint.environments.tools.calls import MAX_CALLS, read_calls

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
        ([("add", '{"b": 1}')], 'add: arguments: "a" is a required'),
        ([("add", '{"a": "1"}')], 'add: arguments.a: "1" is not of type "integer"'),
        ([("add", '{"a": true}')], "arguments.a: True is not of type"),
        ([("add", '{"a": 1, "b": 10}')], "arguments.b: 10 is greater than the maximum of 9"),
        ([("add", '{"a": 1, "c": 10}')], "'c' was unexpected"),
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


def test_a_tool_whose_schema_cannot_be_held_is_no_mistake_of_the_model() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "any"}}}}}
    with pytest.raises(ValueError, match=r"tool 'f': its parameters: .*'any' is not"):
        read_calls([("f", "{}")], [tool], lambda: "1")
