"""The Responses API, with the stock client and with requests as OpenAI's Agents SDK sends them."""

from __future__ import annotations

from typing import Any, cast

import aiohttp
import openai
import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.gateway import Gateway, Session
from counterpoint.environments.scripted import ScriptedModel
from counterpoint.environments.tools.hermes import write_hermes
from tests.environments.gateway.models import RecordingModel, client_of, extends

LOOK: Any = {
    "name": "look",
    "parameters": {
        "properties": {"at": {"title": "At", "type": "string"}},
        "required": ["at"],
        "title": "look_args",
        "type": "object",
        "additionalProperties": False,
    },
    "strict": True,
    "type": "function",
    "description": "Looks.",
}


@pytest.mark.slow  # the first use of the client builds its models
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_their_outputs_continue_the_recorded_tokens(gateway: Gateway, chat: Chat, stream: bool) -> None:
    model = RecordingModel(chat, ["call:there", "one", "two"])
    items: list[Any] = [{"role": "user", "content": "hello"}]
    async with gateway.session(model) as session, client_of(session) as client:
        first = await _respond(client, items, stream=stream)
        [reasoning, call] = first.output
        assert (reasoning.type, call.type, call.name, call.arguments) == (
            "reasoning", "function_call", "look", '{"at":"there"}'
        )  # fmt: skip
        items += [each.model_dump(exclude_unset=True) for each in first.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "a door"}]
        second = await _respond(client, items, stream=stream)
        assert second.output_text == "one"
        assert second.usage is not None
        assert second.usage.input_tokens == len(model.turns[1].prompt_ids)
        items += [each.model_dump(exclude_unset=True) for each in second.output]
        items += [{"role": "user", "content": [{"type": "input_text", "text": "go on"}]}]
        assert (await _respond(client, items, stream=stream)).output_text == "two"
    first_turn, second_turn, third_turn = model.turns
    assert extends(second_turn, first_turn)
    assert extends(third_turn, second_turn)


async def _respond(client: openai.AsyncOpenAI, items: list[Any], *, stream: bool) -> Any:
    asked: Any = {"model": "any", "instructions": "Be good.", "input": items, "tools": [LOOK]}
    if not stream:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as events:
        kinds = [event.type async for event in events]
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        final = await events.get_final_response()
    if final.output[-1].type == "message":
        assert "response.output_text.delta" in kinds
    return final


RUN = (
    b'{"model":"policy","include":[],"input":[{"content":"hello","role":"user"}],"instructions":"Be good.","tools":[{'
    b'"name":"look","parameters":{"properties":{"at":{"title":"At","type":"string"}},"required":["at"],"title":"look_args","type":"object",'
    b'"additionalProperties":false},"strict":true,"type":"function","description":"Looks."}]}'
)
"""The body that openai-agents 0.24 sends for an agent with one function tool."""


async def test_a_request_of_the_agents_sdk_is_the_chat_request_of_the_same_meaning(
    gateway: Gateway, chat: Chat
) -> None:
    model = ScriptedModel(chat, ["one", "two"])
    tools: Any = [{"type": "function", "function": {key: LOOK[key] for key in LOOK if key != "type"}}]
    messages: Any = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "hello"}]
    async with gateway.session(model) as session, client_of(session) as client:
        status, answer = await _post(session, RUN)
        await client.chat.completions.create(model="any", messages=messages, tools=tools)
    assert status == 200
    assert answer["output"][0]["content"][0]["text"] == "one"
    assert model.turns[0].prompt_ids.tolist() == model.turns[1].prompt_ids.tolist()


async def test_a_cut_answer_is_incomplete(gateway: Gateway, chat: Chat) -> None:
    async with gateway.session(RecordingModel(chat, ["cut"])) as session:
        _, answer = await _post(session, b'{"input":"hello","include":["message.output_text.logprobs"]}')
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert {each["logprob"] for each in answer["output"][0]["content"][0]["logprobs"]} == {-0.5}


async def test_the_functions_of_a_namespace_are_offered_as_vllm_offers_them_and_called_by_their_own_names(
    gateway: Gateway, chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside one that the provider runs, which the model does not see."""
    space = {"type": "namespace", "name": "room", "description": "Of a room.", "tools": [LOOK]}
    flat = "room__look"
    model = ScriptedModel(chat, [write_hermes(flat, {"at": "there"}), "one", "two"])
    items: list[Any] = [{"role": "user", "content": "hello"}]
    async with gateway.session(model) as session, client_of(session) as client:
        for _ in range(2):
            answer = await client.responses.create(
                model="any", input=items, tools=cast(Any, [{"type": "web_search"}, space])
            )
            items += [each.model_dump(exclude_unset=True) for each in answer.output]
            if answer.output[-1].type == "function_call":
                call = answer.output[-1]
                assert (call.namespace, call.name) == ("room", "look")
                items += [{"type": "function_call_output", "call_id": call.call_id, "output": "a door"}]
        await client.responses.create(model="any", input="hello", tools=cast(Any, [{**LOOK, "name": flat}]))
    first, second, alone = model.turns
    assert extends(second, first)
    assert first.prompt_ids.tolist() == alone.prompt_ids.tolist()
    assert "web_search" in caplog.text


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ('"previous_response_id":"resp_1"', "previous_response_id"),
        ('"conversation":"c"', "conversation"),
        ('"background":true', "background"),
        ('"tools":[{"type":"web_search"}]', "tools[0]"),
        ('"tools":[{"type":"function","name":"a"},{"type":"mcp"}]', "tools[1]"),
        ('"tools":[{"type":"function","name":"a"},{"type":["web_search"]}]', "tools[1]"),
        ('"tools":[{"type":"web_search"},{"type":"function","name":"a","parameters":3}]', "tools[1].parameters"),
        (
            '"tools":[{"type":"web_search"},{"type":"function","name":"a"}],"tool_choice":{"type":"web_search"}',
            "tool_choice",
        ),
        ('"tools":[{"type":"namespace","name":"a","tools":[]}]', "tools[0].tools"),
        ('"tools":[{"type":"namespace","tools":[{"type":"function","name":"a"}]}]', "tools[0].name"),
        ('"tools":[{"type":"namespace","name":"a","tools":[{"type":"custom","name":"b"}]}]', "tools[0].tools[0].type"),
        ('"tools":[{"type":"namespace","name":"a","tools":[{"type":"function"}]}]', "tools[0].tools[0].name"),
        (
            '"tools":[{"type":"web_search"},{"type":"namespace","name":"a","tools":[{"type":"function","name":"b",'
            '"parameters":3}]}]',
            "tools[1].tools[0].parameters",
        ),
        (
            '"tools":[{"type":"function","name":"a__b"},{"type":"namespace","name":"a","tools":[{"type":"function","name":"b"}]}]',
            "tools[1].tools[0].name",
        ),
        ('"input":[{"type":"function_call","call_id":"1","namespace":3,"name":"a","arguments":"{}"}]', "input[0].name"),
        ('"input":[{"type":"item_reference","id":"x"}]', "input[0].type"),
        ('"input":[{"role":"user","content":[{"type":"input_image"}]}]', "input[0].content[0]"),
        ('"input":[3]', "input[0]"),
        ('"max_output_tokens":0', "max_output_tokens"),
        ('"include":["file_search_call.results"]', "include"),
        ('"stop":"x"', "stop"),
        ('"instructions":"a","input":[{"role":"user","content":"a"},{"role":"judge","content":"a"}]', "input[1].role"),
        (
            '"input":[{"type":"function_call","call_id":"1","name":"a","arguments":"{}"},'
            '{"type":"function_call","call_id":"2","name":"a","arguments":"3"}]',
            "input[1].arguments",
        ),
        ('"input":[{"type":"function_call_output","call_id":3,"output":"a"}]', "input[0].call_id"),
        ('"reasoning":{"effort":"huge"}', "reasoning.effort"),
        ('"text":{"verbosity":3}', "text.verbosity"),
        ('"text":{"format":{"type":"json_schema","schema":3}}', "text.format.schema"),
        ('"tools":[{"type":"function","name":"a","parameters":3}]', "tools[0].parameters"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    gateway: Gateway, chat: Chat, fields: str, parameter: str
) -> None:
    async with gateway.session(ScriptedModel(chat, [])) as session:
        given = fields if '"input"' in fields else f'"input":"hello",{fields}'
        status, answer = await _post(session, f"{{{given}}}".encode())
    assert (status, answer["error"]["param"]) == (400, parameter)
    assert parameter in answer["error"]["message"]


async def _post(session: Session, body: bytes) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{session.base_url}/responses", data=body, headers=headers) as answer,
    ):
        return answer.status, await answer.json()
