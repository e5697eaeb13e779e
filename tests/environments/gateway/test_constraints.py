"""Constrained answers: what they ask of the server, that they are not trained, and which schemas are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson
import pytest

from counterpoint.environments.base import Reply
from counterpoint.environments.chat import Chat, Tool
from counterpoint.environments.gateway import Gateway, Session
from counterpoint.environments.gateway.session import _warn_of_constraints
from counterpoint.environments.sampling import CallOverrides
from counterpoint.transport.records import Turn
from tests.environments.gateway.models import RecordingModel, extends

SCHEMA: Any = {
    "properties": {"a": {"title": "A", "type": "integer"}},
    "required": ["a"],
    "title": "Out",
    "type": "object",
    "additionalProperties": False,
}
HELLO: Any = [{"content": "hello", "role": "user"}]
OUT: Any = {"type": "function", "function": {"name": "Out", "description": "", "parameters": SCHEMA}}
NAMED: Any = {"type": "function", "function": {"name": "Out"}}


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        # As LangChain's with_structured_output sends them, by json_schema and json_mode.
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": SCHEMA, "name": "Out", "strict": True},
                }
            },
            SCHEMA,
        ),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
    ],
)
async def test_a_constrained_answer_is_sampled_by_its_schema_and_not_trained(
    gateway: Gateway, chat: Chat, fields: dict[str, Any], schema: Any
) -> None:
    model = RecordingModel(chat, ['{"a": 3}', "free"])
    async with gateway.session(model) as session:
        status, answer = await _post(session, {"messages": HELLO, **fields})
        message = answer["choices"][0]["message"]
        await _post(session, {"messages": [*HELLO, message, *HELLO]})
    assert (status, message["content"]) == (200, '{"a": 3}')
    asked = model.asked[0]
    assert isinstance(asked, CallOverrides)
    assert orjson.loads(asked.json_schema) == schema
    assert [turn.trained_tokens for turn in model.turns] == [0, len(model.turns[1].completion_ids)]
    assert extends(model.turns[1], model.turns[0])


async def test_a_constraint_is_warned_of_once(gateway: Gateway, chat: Chat, caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_constraints.cache_clear()
    fields = {"messages": HELLO, "response_format": {"type": "json_object"}}
    for _ in range(2):
        async with gateway.session(RecordingModel(chat, ["{}", "{}"])) as session:
            assert [(await _post(session, fields))[0] for _ in range(2)] == [200, 200]
    assert [record.levelname for record in caplog.records if "not trained" in record.message] == ["WARNING"]


async def test_the_responses_api_constrains_alike(gateway: Gateway, chat: Chat) -> None:
    model = RecordingModel(chat, ['{"a": 3}'])
    format = {"type": "json_schema", "name": "final_output", "schema": SCHEMA, "strict": True}
    async with gateway.session(model) as session:
        status, _ = await _post(session, {"input": HELLO, "text": {"format": format}}, path="responses")
    assert status == 200
    assert isinstance(asked := model.asked[0], CallOverrides)
    assert orjson.loads(asked.json_schema) == SCHEMA
    assert model.turns[0].trained_tokens == 0


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_demanded_call_is_read_from_json_and_continues_its_tokens(
    gateway: Gateway, chat: Chat, choice: Any
) -> None:
    model = RecordingModel(chat, ['[{"name": "Out", "parameters": {"a": 3}}]', "free"])
    demand = {"messages": HELLO, "tools": [OUT], "tool_choice": choice, "parallel_tool_calls": False}
    async with gateway.session(model) as session:
        status, answer = await _post(session, demand)
        message = answer["choices"][0]["message"]
        [call] = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        await _post(session, {"messages": [*HELLO, message, result], "tools": [OUT]})
    assert (status, call["function"]) == (200, {"name": "Out", "arguments": '{"a":3}'})
    assert isinstance(asked := model.asked[0], CallOverrides)
    assert orjson.loads(asked.json_schema)["maxItems"] == 1
    assert model.turns[0].trained_tokens == 0
    assert extends(model.turns[1], model.turns[0])


class ReasoningModel(RecordingModel):
    """Reasons up to `therefore`, as a server's parser of reasoning reads it."""

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        thought, _, content = self.chat.decode(turn.completion_ids.tolist()).partition("therefore")
        return Reply(content, thought)


async def test_a_demanded_call_may_follow_reasoning(gateway: Gateway, chat: Chat) -> None:
    model = ReasoningModel(chat, ['it is [3] therefore [{"name": "Out", "parameters": {"a": 3}}]', "free"])
    async with gateway.session(model) as session:
        _, answer = await _post(session, {"messages": HELLO, "tools": [OUT], "tool_choice": "required"})
        message = answer["choices"][0]["message"]
        [call] = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        await _post(session, {"messages": [*HELLO, message, result], "tools": [OUT]})
    assert call["function"] == {"name": "Out", "arguments": '{"a":3}'}
    assert message["reasoning_content"] == "it is [3] "
    assert model.turns[0].trained_tokens == 0
    assert extends(model.turns[1], model.turns[0])


async def test_a_demanded_call_that_was_cut_is_text(gateway: Gateway, chat: Chat) -> None:
    async with gateway.session(RecordingModel(chat, ['[{"name": "Out"'])) as session:
        _, answer = await _post(session, {"messages": HELLO, "tools": [OUT], "tool_choice": "required"})
    assert answer["choices"][0]["message"]["content"] == '[{"name": "Out"'


@pytest.mark.parametrize(
    "schema",
    [
        None,
        [],
        {"properties": {f"p{index}": {"type": "string"} for index in range(1000)}},
        {"properties": {"x": {"type": "string", "pattern": "(a+)+b"}}},
        {"anyOf": [{"patternProperties": {}}]},
        {"$defs": {"x": {"maxLength": 10**9}}},
        {"items": {}, "maxItems": 10**9},
        {"items": {}, "minItems": -1},
        {"minLength": 1.5},
        {"$ref": "http://127.0.0.1/schema"},
        {"properties": {f"p{length}": {"type": "string", "maxLength": length} for length in range(200, 206)}},
    ],
)
async def test_a_schema_that_may_hold_a_server_up_is_refused(gateway: Gateway, chat: Chat, schema: Any) -> None:
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    model = RecordingModel(chat, [])
    async with gateway.session(model) as session:
        status, answer = await _post(session, {"messages": HELLO, "response_format": given})
        tool = {"type": "function", "function": {"name": "x", "parameters": schema}}
        if schema:
            demand = {"messages": HELLO, "tools": [tool], "tool_choice": "required"}
            demanded, _ = await _post(session, demand)
            assert demanded == 400
    assert status == 400
    assert answer["error"]["message"]
    assert not model.asked


async def test_definitions_that_are_no_table_are_refused(gateway: Gateway, chat: Chat) -> None:
    tool = {"type": "function", "function": {"name": "x", "parameters": {"$defs": ["a", "b"]}}}
    async with gateway.session(RecordingModel(chat, [])) as session:
        status, answer = await _post(session, {"messages": HELLO, "tools": [tool], "tool_choice": "required"})
    assert (status, answer["error"]["param"]) == (400, "tools")


async def test_many_texts_of_one_length_are_taken(gateway: Gateway, chat: Chat) -> None:
    schema = {"properties": {f"p{index}": {"type": "string", "maxLength": 200} for index in range(50)}}
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with gateway.session(RecordingModel(chat, ["{}"])) as session:
        status, _ = await _post(session, {"messages": HELLO, "response_format": given})
    assert status == 200


async def test_names_of_properties_and_values_are_no_keys_of_a_schema(gateway: Gateway, chat: Chat) -> None:
    schema = {"properties": {"pattern": {"enum": [{"maxLength": 10**9}]}, "maxLength": {"type": "integer"}}}
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with gateway.session(RecordingModel(chat, ["{}"])) as session:
        status, _ = await _post(session, {"messages": HELLO, "response_format": given})
    assert status == 200


async def _post(session: Session, fields: dict[str, Any], path: str = "chat/completions") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{session.base_url}/{path}", json=fields, headers=headers) as answer,
    ):
        return answer.status, await answer.json()
