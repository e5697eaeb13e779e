"""Anthropic's Messages API, with the stock client and with requests as agents send them."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import pytest

from counterpoint.environments.base import Reply, ToolCall
from counterpoint.environments.chat import Chat, Tool
from counterpoint.environments.gateway import Gateway, Session
from counterpoint.environments.gateway.anthropic_request import chat_fields
from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.gateway.messages import template_messages
from counterpoint.environments.sampling import SamplingOverrides
from counterpoint.environments.scripted import ScriptedModel
from counterpoint.environments.tools.hermes import write_hermes
from counterpoint.transport.records import Turn
from tests.environments.gateway.models import RecordingModel, client_of, extends
from tests.support.growth import assert_growth

LOOK: Any = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    "cache_control": {"type": "ephemeral"},
}
AS_FUNCTION: Any = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": LOOK["input_schema"]},
}
HELLO: Any = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def anthropic_of(session: Session, api_key: str | None = None) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The stock client of a session, which tries everything once."""
    key = session.api_key if api_key is None else api_key
    async with anthropic.AsyncAnthropic(base_url=session.anthropic_url, api_key=key, max_retries=0) as client:
        yield client


async def _ask(client: anthropic.AsyncAnthropic, messages: Any, *, stream: bool = False, **more: Any) -> Any:
    asked: Any = {"model": "any", "max_tokens": 64, "system": "Be good.", "messages": messages, **more}
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as events:
        kinds = [event.type async for event in events]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        return await events.get_final_message()


@pytest.mark.slow  # the first use of the client builds its models
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keeps", ["all", "no thinking", "given back as sent"])
async def test_calls_and_their_results_continue_the_recorded_tokens(
    gateway: Gateway, chat: Chat, stream: bool, keeps: str
) -> None:
    model = ReasoningModel(chat, ["call:there", "one", "two"])
    messages: list[Any] = [*HELLO]
    async with gateway.session(model) as session, anthropic_of(session) as client:
        first = await _ask(client, messages, stream=stream, tools=[LOOK])
        thinking, text, call = first.content
        assert (thinking.type, thinking.thinking, text.text) == ("thinking", "because", "well")
        assert (call.type, call.name, call.input, first.stop_reason) == (
            "tool_use",
            "look",
            {"at": "there"},
            "tool_use",
        )
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "a door"}]}
        messages += [_given_back(first, keeps), {"role": "user", "content": [result]}]
        second = await _ask(client, messages, stream=stream, tools=[LOOK])
        assert [block.text for block in second.content] == ["one"]
        assert second.stop_reason == "end_turn"
        assert second.usage.input_tokens == len(model.turns[1].prompt_ids)
        assert second.usage.output_tokens == len(model.turns[1].completion_ids)
        messages += [_given_back(second, keeps), {"role": "user", "content": [{"type": "text", "text": "go on"}]}]
        await _ask(client, messages, stream=stream, tools=[LOOK])
    first_turn, second_turn, third_turn = model.turns
    assert extends(second_turn, first_turn)
    assert extends(third_turn, second_turn)


async def test_a_tool_whose_definition_is_deferred_is_in_the_prompt_where_a_result_refers_to_it(
    gateway: Gateway, chat: Chat
) -> None:
    """As Claude Code has it: it declares the tool beside the result, which would else be a branch."""
    model = ScriptedModel(chat, [write_hermes("look", {"at": "it"}), write_hermes("find", {}), "one"])
    find = {"name": "find", "description": "Finds.", "input_schema": {"type": "object"}, "defer_loading": True}
    messages: list[Any] = [*HELLO]
    async with gateway.session(model) as session, anthropic_of(session) as client:
        for tools in ([LOOK, find | {"name": "never"}], [LOOK, find], [LOOK, find]):
            answer = await _ask(client, messages, tools=tools)
            messages.append({"role": "assistant", "content": answer.content})
            if answer.content[0].type == "tool_use":
                said = [{"type": "tool_reference", "tool_name": "find"}] * 2 if len(messages) == 2 else "found"
                result = {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": said}
                messages.append({"role": "user", "content": [result]})
    first, second, third = model.turns
    assert messages[3]["content"][0].name == "find"
    assert extends(second, first)
    assert extends(third, second)
    [prompt, read] = (chat.decode(turn.prompt_ids.tolist()) for turn in (first, third))
    assert "never" not in prompt
    assert read.count('"description":"Finds."') == 1
    assert first.trained_tokens == len(first.completion_ids)


class ReasoningModel(RecordingModel):
    """Says something before its calls, for which it reasons."""

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        reply = await super().parse(turn, tools, reasoning=reasoning)
        return replace(reply, content="well") if reply.calls else reply


def _given_back(message: Any, keeps: str) -> dict[str, Any]:
    blocks = [block.model_dump() for block in message.content]
    if keeps == "given back as sent":
        blocks = [block.model_dump(exclude_unset=True) for block in message.content]
        blocks[-1]["cache_control"] = {"type": "ephemeral"}
    return {
        "role": "assistant",
        "content": [block for block in blocks if keeps != "no thinking" or block["type"] != "thinking"],
    }


@pytest.mark.slow
async def test_a_request_has_the_tokens_of_the_chat_request_of_the_same_meaning(gateway: Gateway, chat: Chat) -> None:
    model = ScriptedModel(chat, ["one", "two"])
    system: Any = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "good."},
    ]
    messages: Any = [{"role": "system", "content": "Be\ngood."}, *HELLO]
    async with gateway.session(model) as session, anthropic_of(session) as client, client_of(session) as other:
        counted = await client.messages.count_tokens(model="any", system=system, messages=HELLO, tools=[LOOK])
        assert not model.turns
        await client.messages.create(
            model="any", max_tokens=9, system=system, messages=HELLO, tools=[LOOK], metadata={"user_id": "x"}
        )
        await other.chat.completions.create(model="any", messages=messages, tools=[AS_FUNCTION])
    assert model.turns[0].prompt_ids.tolist() == model.turns[1].prompt_ids.tolist()
    assert counted.input_tokens == len(model.turns[0].prompt_ids)


async def test_why_a_turn_ended(gateway: Gateway, chat: Chat) -> None:
    async with gateway.session(RecordingModel(chat, ["cut", "one END two", "call:x"])) as session:
        answers = [
            (await _post(session, {"messages": HELLO, "max_tokens": 64, "stop_sequences": stop, **more}))[1]
            for stop, more in (([], {}), (["END"], {}), ([], {"tools": [LOOK]}))
        ]
    assert [(each["stop_reason"], each["stop_sequence"]) for each in answers] == [
        ("max_tokens", None), ("stop_sequence", "END"), ("tool_use", None)
    ]  # fmt: skip
    assert answers[1]["content"] == [{"type": "text", "text": "one "}]


class Thinking(RecordingModel):
    """Reasons up to `;`, as a server with a parser of reasoning has it: white space at its ends is gone.

    A turn with `X` or a line's end was ended by a stop string.
    """

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        turn = await super().generate(prompt_ids, sampling)
        if {"X", "\n"} & {*self.chat.decode(turn.completion_ids.tolist())}:
            ids, values = turn.completion_ids[:-1], turn.log_probabilities[:-1]
            turn = self.turns[-1] = replace(turn, completion_ids=ids, log_probabilities=values)
        return turn

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        thought, _, said = self.chat.decode(turn.completion_ids.tolist()).partition(";")
        calls = (ToolCall("call_1", "look", {"at": "x"}),) if "call" in said else ()
        return Reply("" if calls else said.strip(), thought.strip(), calls)


@pytest.mark.slow  # the first use of the client builds its models
@pytest.mark.parametrize(
    ("written", "stop", "thought", "said", "reason", "sequence"),
    [
        ("t1 t2 X", ["X"], "t1 t2 ", "", "stop_sequence", "X"),
        ("t1 X \n", ["X \n"], "t1 ", "", "stop_sequence", "X \n"),
        ("t1\n\n", ["\n\n"], "t1", "", "stop_sequence", "\n\n"),
        ("t1; yes X", ["Y", "X"], "t1", "yes ", "stop_sequence", "X"),
        ("t1; yes XY", ["XY", "X"], "t1", "yes ", "stop_sequence", "X"),
        ("t1; yes", ["X"], "t1", "yes", "end_turn", None),
        ("t1; yes", ["<|end|>"], "t1", "yes", "end_turn", None),
        ("t1; call X", ["X"], "t1", "", "tool_use", None),
    ],
)
async def test_a_stop_sequence_ends_a_turn_wherever_it_is_written(
    gateway: Gateway, chat: Chat, written: str, stop: list[str], thought: str, said: str, reason: str, sequence: str
) -> None:
    model = Thinking(chat, [written, written, "more"])
    asked: dict[str, Any] = {"max_tokens": 64, "stop_sequences": stop, "tools": [LOOK]}
    async with gateway.session(model) as session, client_of(session) as client:
        plain = await client.chat.completions.create(model="any", messages=HELLO, stop=stop, tools=[AS_FUNCTION])
        _, answer = await _post(session, asked | {"messages": HELLO})
        if reason != "tool_use":  # what the agent read continues the turn
            history = [*HELLO, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "on"}]
            await _post(session, asked | {"messages": history})
            assert extends(model.turns[2], model.turns[1])
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    found = {each["type"]: each for each in answer["content"]}
    assert (found["thinking"]["thinking"], found.get("text", {}).get("text", "")) == (thought, said)
    message = plain.choices[0].message
    assert ((message.model_extra or {})["reasoning_content"], message.content or "") == (thought, said)


async def test_demanded_calls_and_schemas_constrain_as_in_a_chat(gateway: Gateway, chat: Chat) -> None:
    model = RecordingModel(chat, ['[{"name": "look", "parameters": {"at": "x"}}]', "{}"])
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    choice = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
    async with gateway.session(model) as session:
        _, called = await _post(session, {"messages": HELLO, "tools": [LOOK], "tool_choice": choice})
        status, _ = await _post(
            session, {"messages": HELLO, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
        )
    assert called["content"][0]["input"] == {"at": "x"}
    assert status == 200
    schemas = [json.loads(getattr(asked, "json_schema", "")) for asked in model.asked]
    assert schemas[1] == schema
    assert "look" in json.dumps(schemas[0])


@pytest.mark.slow
async def test_errors_have_anthropics_shape(gateway: Gateway, chat: Chat) -> None:
    model = ScriptedModel(chat, [])
    async with gateway.session(model) as session:
        async with anthropic_of(session, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(model="any", max_tokens=9, messages=HELLO)
        assert caught.value.type == "authentication_error"
        async with anthropic_of(session) as client:
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.create(model="any", max_tokens=0, messages=HELLO)
        assert refused.value.type == "invalid_request_error"
        assert "max_tokens" in str(refused.value)
        assert any("max_tokens" in error for error in session.errors)
        headers = {"X-Api-Key": session.api_key}
        async with aiohttp.ClientSession() as http, http.get(f"{session.base_url}/models", headers=headers) as answer:
            assert answer.status == 200


def answered(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": [block]}, *HELLO]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]}]},
            "messages[0].content[0].content[0]",
        ),
        (answered({"type": "redacted_thinking"}), "messages[0].content[0].type"),
        (answered({"type": "tool_use", "id": "1", "name": "a", "input": "{}"}), "messages[0].content[0].input"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "It is"}]}, "messages"),
        ({"messages": HELLO, "system": 3}, "system"),
        ({"messages": HELLO, "max_tokens": True}, "max_tokens"),
        ({"messages": HELLO, "tools": "x"}, "tools"),
        (
            {
                "messages": [
                    *HELLO,
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "1",
                                "content": [{"type": "tool_reference", "tool_name": ["x"]}],
                            }
                        ],
                    },
                ],
                "tools": [LOOK],
            },
            "messages[1].content[0].content[0].tool_name",
        ),
        ({"messages": HELLO, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"messages": HELLO, "tool_choice": {"type": "some"}}, "tool_choice.type"),
        (
            {"messages": HELLO, "tool_choice": {"type": "auto", "disable_parallel_tool_use": "false"}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"messages": HELLO, "thinking": {"type": "much"}}, "thinking.type"),
        ({"messages": HELLO, "tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"messages": HELLO, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        (answered({"type": "tool_use", "id": "1", "name": 3, "input": {}}), "messages[0].content[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": HELLO, "output_config": {"format": {"type": "grammar"}}}, "output_config.format.type"),
        ({"messages": HELLO, "mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"messages": HELLO, "container": "x"}, "container"),
        ({"messages": HELLO, "frequency_penalty": 1}, "frequency_penalty"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_served_is_refused_by_its_place(chat: Chat, fields: dict[str, Any], where: str) -> None:
    with pytest.raises(GatewayRefused) as refused:
        chat_fields(fields, chat)
    assert refused.value.parameter == where


SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"top_p": 3}, "top_p"),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_config.format.schema"),
        ({"tools": [{"name": "look", "input_schema": 3}]}, "tools[0].input_schema"),
        ({"tools": [LOOK, LOOK]}, "tools[1].name"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["", "/count_tokens"])
async def test_a_refusal_names_the_fields_of_this_api(
    gateway: Gateway, chat: Chat, fields: dict[str, Any], where: str, path: str
) -> None:
    async with gateway.session(ScriptedModel(chat, [])) as session:
        status, answer = await _post(session, {"messages": HELLO, **fields}, path)
        assert (status, answer["error"]["message"].split(" ")[0]) == (400, where)


@pytest.mark.parametrize("path", ["/batches", "/count_tokens/", "/batches/1/results"])
async def test_an_unknown_path_of_this_api_is_refused_in_its_shape(gateway: Gateway, chat: Chat, path: str) -> None:
    async with gateway.session(ScriptedModel(chat, [])) as session:
        status, answer = await _post(session, {"messages": HELLO}, path)
    assert (status, answer["type"], answer["error"]["type"]) == (404, "error", "not_found_error")


def test_parts_of_an_answer_in_another_order_are_messages_of_their_own(chat: Chat) -> None:
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, call, {"type": "text", "text": "c"}]
    read = template_messages(
        chat_fields({"messages": [{"role": "assistant", "content": blocks}, *HELLO]}, chat)["messages"]
    )
    assert [message.get("content") for message in read] == ["a\nb", "c", "hello"]
    assert [len(message.get("tool_calls", ())) for message in read] == [1, 0, 0]


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_many_blocks_of_text_are_read_in_linear_time(chat: Chat, role: str) -> None:
    def many(size: int) -> list[Any]:
        # Four bytes for each character of a text with such a face.
        return [{"type": "text", "text": text} for text in ("\N{GRINNING FACE}", *["x" * 360] * size)]

    def read(blocks: list[Any]) -> list[Any]:
        return template_messages(
            chat_fields({"messages": [{"role": role, "content": blocks}, *HELLO]}, chat)["messages"]
        )

    assert read(many(500))[0]["content"] == "\n".join(block["text"] for block in many(500))
    assert_growth(many, read, 500)


@pytest.mark.parametrize(
    ("template", "kwargs", "fields", "effort"),
    [
        ("{{ enable_thinking }}", {}, {"thinking": {"type": "disabled"}}, "none"),
        ("{{ enable_thinking }}", {"enable_thinking": True}, {"thinking": {"type": "disabled"}}, None),
        ("{{ enable_thinking }}", {}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, None),
        ("{{ reasoning_effort }}", {}, {"output_config": {"effort": "high"}}, "high"),
        ("", {}, {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, None),
    ],
)
def test_thinking_and_effort_count_where_the_template_reads_them(
    chat_with: Callable[[str], Chat], template: str, kwargs: dict[str, Any], fields: dict[str, Any], effort: str | None
) -> None:
    chat = chat_with(template).with_template_kwargs(kwargs)
    assert chat_fields({"messages": HELLO, **fields}, chat).get("reasoning_effort") == effort


@pytest.fixture
def chat_with(tokenizer_directory: Path, tmp_path: Path) -> Callable[[str], Chat]:
    """Makes a chat whose template begins with a text."""

    def make(beginning: str) -> Chat:
        directory = Path(shutil.copytree(tokenizer_directory, tmp_path / "model"))
        messages = "{% for m in messages %}{{ m.role }}{{ m.content }}<end>{% endfor %}"
        (directory / "chat_template.jinja").write_text(beginning + messages)
        return Chat(directory)

    return make


async def _post(session: Session, fields: dict[str, Any], path: str = "") -> tuple[int, dict[str, Any]]:
    headers = {"X-Api-Key": session.api_key, "Anthropic-Version": "2023-06-01"}
    url = f"{session.anthropic_url}/v1/messages{path}?beta=true"
    async with aiohttp.ClientSession() as http, http.post(url, json=fields, headers=headers) as answer:
        return answer.status, await answer.json()
