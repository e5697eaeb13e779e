"""Constrained answers: what they ask of the server, that they are not trained, and which schemas are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import orjson
import pytest
from jsonschema_specifications import REGISTRY

from counterpoint.environments.base import Reply, ToolCall
from counterpoint.environments.chat import Chat, Tool
from counterpoint.environments.gateway import Gateway, Session
from counterpoint.environments.gateway.constraints import FORMATS, check_kept, checked_schema, response_schema
from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.gateway.session import _warn_of_constraints
from counterpoint.environments.sampling import CallOverrides
from counterpoint.transport.exact_json import JsonError, loads
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


class JsonCallingModel(ReasoningModel):
    """Also reads each JSON object with a name and parameters as a call, as vLLM's parser `llama3_json` does."""

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        reply = await super().parse(turn, tools, reasoning=reasoning)
        found = re.search(r'{"name": "(\w+)", "parameters": ({.*?})}', reply.content)
        if not tools or found is None:
            return reply
        return Reply("", reply.reasoning, (ToolCall("call_1", found[1], orjson.loads(found[2])),))


@pytest.mark.parametrize("before", ["", "it is [3] therefore "])
async def test_a_demanded_call_is_read_whatever_the_servers_parser_takes_for_a_call(
    gateway: Gateway, chat: Chat, before: str
) -> None:
    model = JsonCallingModel(chat, [before + '[{"name": "Out", "parameters": {"a": 3}}]'])
    async with gateway.session(model) as session:
        status, answer = await _post(session, {"messages": HELLO, "tools": [OUT], "tool_choice": "required"})
    assert status == 200, answer
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "Out", "arguments": '{"a":3}'}


async def test_a_constrained_answer_that_looks_like_a_call_is_text(gateway: Gateway, chat: Chat) -> None:
    text = '{"name": "Out", "parameters": {"a": 3}}'
    async with gateway.session(JsonCallingModel(chat, [f"so therefore {text}"])) as session:
        fields = {"messages": HELLO, "tools": [OUT], "response_format": {"type": "json_object"}}
        status, answer = await _post(session, fields)
    assert (status, answer["choices"][0]["message"]["content"].strip()) == (200, text)


async def test_a_demanded_call_that_was_cut_is_text(gateway: Gateway, chat: Chat) -> None:
    async with gateway.session(RecordingModel(chat, ['[{"name": "cut'])) as session:
        _, answer = await _post(session, {"messages": HELLO, "tools": [OUT], "tool_choice": "required"})
    assert answer["choices"][0]["message"]["content"] == '[{"name": "cut'


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


@pytest.mark.parametrize("said", ["", "no", '{"a": "x"}', '{"a": 3, "\\u0061": "x"}', '{"a": 3} {}', '{"a": 1e999}'])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "chat/completions",
            {
                "messages": HELLO,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            },
        ),
        ("responses", {"input": HELLO, "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
        (
            "messages",
            {
                "messages": HELLO,
                "max_tokens": 64,
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            },
        ),
        ("chat/completions", {"messages": HELLO, "tools": [OUT], "tool_choice": "required"}),
    ],
)
async def test_an_answer_that_ended_and_breaks_its_schema_is_an_error(
    gateway: Gateway, chat: Chat, said: str, path: str, fields: Any
) -> None:
    model = RecordingModel(chat, [said])
    async with gateway.session(model) as session:
        status, answer = await _post(session, fields, path)
        assert not session.turns
    assert status == 502
    assert answer["error"]["message"]
    assert model.turns[0].trained_tokens == 0


async def test_an_answer_that_was_cut_or_stopped_need_not_fit(gateway: Gateway, chat: Chat) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    async with gateway.session(RecordingModel(chat, ['{"cut', '{"a": X'])) as session:
        statuses = [
            (await _post(session, {"messages": HELLO, "response_format": format, "stop": stop}))[0]
            for stop in ([], ["X"])
        ]
    assert statuses == [200, 200]


def keys_of_the_page() -> dict[str, str]:
    """What docs/gateway.md says of each key of a JSON schema."""
    page = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()
    rows = page.partition("| key | |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [row.strip("|").split("|") for row in rows]
    return {key.strip(" `"): said.strip() for keys, said in cells for key in keys.split(",")}


def test_the_page_has_every_key_of_every_draft() -> None:
    keys = {
        key for uri in REGISTRY for key in (REGISTRY[uri].contents.get("properties", {}) if "/draft" in uri else ())
    }
    assert len(keys) > 60
    assert keys_of_the_page().keys() == keys | {"nullable", "x-guidance"}


@pytest.mark.parametrize("key", keys_of_the_page())
def test_a_key_is_refused_or_taken_as_the_page_says(key: str) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, key: {}}
    if key in ("maxItems", "minItems", "maxLength", "minLength", "maxProperties", "minProperties"):
        schema[key] = 1
    schema |= {"$ref": "#/properties/a"} if key == "$ref" else {"format": "email"} if key == "format" else {}
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"items": {"anyOf": [schema]}}}}
    if keys_of_the_page()[key].startswith("refused"):
        with pytest.raises(GatewayRefused, match=re.escape(repr(key))):
            response_schema(given)
    else:
        assert orjson.loads(response_schema(given)) == given["json_schema"]["schema"]  # type: ignore[index]


def test_formats_are_those_of_the_page() -> None:
    assert re.findall(r"`([a-z0-9-]+)`", keys_of_the_page()["format"]) == list(FORMATS)


VALUES: list[Any] = [None, True, 0, 1, 2.5, "", "a", 'q"\n', "é", [], [1], {"a": 1}]
NUMBERS = [-2, -0.5, 0, 0.25, 0.5, 1, 1.0, 2, 3]


def schema_of(random: Random, depth: int = 0) -> Any:
    """A schema of keys that are held."""

    def some(make: Callable[[], Any], *keys: str) -> dict[str, Any]:
        return {key: make() for key in keys if random.random() < 0.4}

    def several() -> list[Any]:
        return [schema_of(random, depth + 1) for _ in range(random.randint(1, 3))]

    def count() -> int:
        return random.randint(0, 3)

    def number() -> float:
        return random.choice(NUMBERS)

    limits = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    plain: list[Callable[[], Any]] = [
        lambda: {"enum": random.choices(VALUES, k=3)},
        lambda: {"const": random.choice(VALUES)},
        lambda: {"type": random.choice(["number", "integer"]), **some(number, *limits)},
        lambda: {"type": "number", "multipleOf": random.choice([0.5, 0.25, 2, 3]), **some(number, "minimum")},
        lambda: {"type": "string", **some(count, "minLength", "maxLength")},
        lambda: {"type": "string", "format": random.choice(FORMATS)},
        lambda: {"type": random.choice(["null", "boolean", ["string", "null"]])},
        lambda: random.choice([True, {}]),
    ]

    def object_of() -> Any:
        names = random.sample(["a", "b", "ü", "a/b"], k=count())
        found = {"type": "object", "properties": {name: schema_of(random, depth + 1) for name in names}}
        found |= {"required": names if random.random() < 0.5 else random.sample(["a", "b", "c"], k=2)}
        found |= some(count, "minProperties", "maxProperties")
        return found | some(lambda: random.choice([False, schema_of(random, depth + 1)]), "additionalProperties")

    nested: list[Callable[[], Any]] = [
        object_of,
        object_of,
        lambda: {"type": "array", "items": schema_of(random, depth + 1), **some(count, "minItems", "maxItems")},
        lambda: {
            "type": "array",
            "prefixItems": several(),
            "items": random.choice([False, schema_of(random, depth + 1)]),
        },
        lambda: {random.choice(["allOf", "anyOf", "oneOf"]): several()},
        lambda: {"$ref": "#/$defs/x", "$defs": {"x": schema_of(random, 2)}} if depth == 0 else {"type": "string"},
    ]
    return random.choice(plain if depth > 1 else [*plain, *nested, *nested])()


def sampled(grammar: str, tokenizer: Any, random: Random) -> str | None:
    """A text of random bytes that the grammar allows one after another; None if it does not come to an end soon."""
    import llguidance

    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    text = bytearray()
    while not matcher.is_stopped() and len(text) < 400:
        allowed = {token for token, weight in enumerate(matcher.compute_logit_bias()) if weight}
        ends = tokenizer.eos_token in allowed and random.random() < 0.4
        if ends or not (allowed := allowed - {tokenizer.eos_token}):
            break
        likely = [
            token for token in sorted(allowed) if token in (b'"}]' if len(text) > 60 else b'"}],:{[ab\\u0061123e.')
        ]
        token = random.choice(likely if likely and random.random() < 0.8 else sorted(allowed))
        matcher.consume_token(token)
        text.append(token)
    return text.decode() if matcher.is_accepting() else None


def kept(text: str, schema: str) -> bool:
    """Whether it passes as an answer."""
    try:
        check_kept(text, schema)
    except GatewayRefused:
        return False
    return True


def fits(text: str, schema: Any) -> bool:
    """Whether it is JSON, and the schema allows it."""
    from jsonschema import Draft202012Validator

    try:
        value = loads(text)
    except JsonError:
        return False
    return bool(Draft202012Validator(schema).is_valid(value))


@pytest.mark.slow
def test_what_is_taken_is_held() -> None:
    """Of what llguidance lets through, nothing passes that `jsonschema` refuses, and nothing else is refused."""
    import llguidance

    tokenizer = llguidance.LLTokenizer("byte")
    compared = 0
    for seed in range(250):
        random = Random(seed)
        schema = schema_of(random)
        if not isinstance(schema, dict):
            continue
        text = checked_schema(schema, "schema")
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": True})
        if llguidance.LLMatcher.validate_grammar(grammar, None):
            continue  # the server refuses it
        for _ in range(5):
            if (said := sampled(grammar, tokenizer, random)) is not None:
                compared += 1
                assert kept(said, text) == fits(said, schema), (schema, said)
    assert compared > 500


async def _post(session: Session, fields: dict[str, Any], path: str = "chat/completions") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{session.base_url}/{path}", json=fields, headers=headers) as answer,
    ):
        return answer.status, await answer.json()
