"""A typed function becomes a tool: its schema for the model, and a call that checks and converts."""

from __future__ import annotations

import asyncio
import threading
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from counterpoint.environments.tools import definition
from counterpoint.environments.tools.definition import ToolError, as_text, in_thread, make_definition, tool_from


def search(
    query: str, limit: Annotated[int, Field(ge=1, le=9)] = 3, *, kind: Literal["a", "b"] = "a", state: dict[str, Any]
) -> list[str]:
    """Searches the library
    for a text.

    It is not fast.

    Args:
        query: what to look for,
            in full.
        limit (int): how many.

    Returns:
        Titles.
    """
    state["asked"] = query
    return [kind] * limit


def test_the_schema_is_that_of_the_signature() -> None:
    function = tool_from(search).definition["function"]
    assert function["name"] == "search"
    assert function["description"] == "Searches the library for a text.\n\nIt is not fast."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for, in full."},
            "limit": {"type": "integer", "default": 3, "minimum": 1, "maximum": 9, "description": "how many."},
            "kind": {"type": "string", "enum": ["a", "b"], "default": "a"},
        },
        "required": ["query"],
        "additionalProperties": False,
    }


async def test_a_call_checks_converts_and_gets_the_state() -> None:
    state: dict[str, Any] = {}
    tool = tool_from(search)
    assert await tool.call({"query": "x", "limit": 2, "kind": "b"}, state) == ["b", "b"]
    assert state == {"asked": "x"}
    for arguments, said in (
        ({}, "query: Missing"),
        ({"query": "x", "limit": 10}, "limit"),
        ({"query": "x", "state": 1}, "state"),
    ):
        with pytest.raises(ToolError, match=said):
            await tool.call(arguments, state)


async def test_an_asynchronous_function_runs_on_the_loop() -> None:
    async def where(schema: str = "x") -> str:
        return threading.current_thread().name + schema

    assert await tool_from(where).call({}, {}) == threading.current_thread().name + "x"


async def test_a_function_runs_in_a_thread_and_its_exception_comes_back() -> None:
    def where() -> str:
        return threading.current_thread().name

    def fail() -> None:
        raise StopIteration

    assert await tool_from(where).call({}, {}) == "tool where"
    with pytest.raises(ToolError, match="StopIteration"):
        await tool_from(fail).call({}, {})


async def test_functions_that_hang_take_no_more_than_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "_threads", threading.Semaphore(1))
    gate = threading.Event()
    hung = asyncio.create_task(in_thread(gate.wait, "hung"))
    await asyncio.sleep(0)
    with pytest.raises(ToolError, match="under way or hang"):
        await in_thread(list, "other")
    gate.set()
    assert await hung
    assert await in_thread(list, "other") == []


def by_position(x: int, /) -> None: ...


def variable(*x: int) -> None: ...


def untyped(x) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    ("function", "said"), [(by_position, "by name"), (variable, "by name"), (untyped, "no annotation")]
)
def test_functions_that_are_no_tools(function: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tool_from(function)


def test_names_that_models_cannot_write() -> None:
    with pytest.raises(ValueError, match="expected a name of letters"):
        make_definition("a b", "", {})


def test_results_as_text() -> None:
    assert [as_text(value) for value in (None, "x", 1, {"a": [1]}, {1.5})] == ["", "x", "1", '{"a": [1]}', '"{1.5}"']
