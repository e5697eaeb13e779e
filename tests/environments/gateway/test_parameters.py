"""The table of parameters in `docs/gateway.md`: it has all of OpenAI's and Anthropic's, and the gateway does what it says."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import aiohttp
import numpy as np
import openai
import pytest
from anthropic.types.beta import message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from counterpoint.environments.chat import Chat
from counterpoint.environments.gateway import Gateway, responses
from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.gateway.requests import Asked, chat_request, completion_request
from counterpoint.environments.sampling import CallOverrides, SamplingConfig, SamplingOverrides
from counterpoint.transport.records import Alternatives, Turn
from tests.environments.gateway.models import RecordingModel, client_of, extends

PAGE = Path(__file__).parents[3] / "docs/gateway.md"
APIS = ("chat", "responses", "completions", "messages")
PATHS = {"chat": "chat/completions", "responses": "responses", "completions": "completions", "messages": "messages"}
CLIENTS = {
    "chat": chat_create_params.CompletionCreateParams,
    "responses": response_create_params.ResponseCreateParams,
    "completions": completion_create_params.CompletionCreateParams,
    "messages": message_create_params.MessageCreateParams,
}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {}}}
LEAST: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hello"}]},
    "responses": {"input": "hello"},
    "completions": {"prompt": "hello"},
    "messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
}
NEWER = {"responses": {"access_programs", "background_options", "client_metadata", "image"}}
"""Parameters that the installed clients lack: those of openai 3.57.0, and what Codex 0.171.0 sends with each request."""
VALUES: dict[str, Any] = {
    "access_programs": {"research": True},
    "background_options": {"completion_window": "soonest"},
    "client_metadata": {"x-codex-installation-id": "0198-41", "turn_id": "1"},
    "image": {"detail": "low"},
    "audio": {"voice": "x", "format": "wav"},
    "background": True,
    "cache_control": {"type": "ephemeral"},
    "container": "x",
    "best_of": 2,
    "billing_policy": "x",
    "compaction": {"type": "summarize"},
    "fallback_credit_token": "x",
    "fallbacks": [{"model": "x"}],
    "mcp_servers": [{"type": "url", "url": "x"}],
    "thread": {"type": "create"},
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "diagnostics": {"previous_message_id": "msg_1"},
    "echo": True,
    "frequency_penalty": 0.5,
    "function_call": "auto",
    "functions": [{"name": "look"}],
    "inference_geo": "eu",
    "include": ["message.output_text.logprobs"],
    "instructions": "Be good.",
    "logit_bias": {"5": 1},
    "logprobs": True,
    "max_completion_tokens": 5,
    "max_output_tokens": 5,
    "max_tokens": 5,
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "model": "gpt-x",
    "moderation": {"model": "x"},
    "n": 2,
    "output_config": {"effort": "low"},
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": 0.5,
    "previous_response_id": "resp_1",
    "prompt": {"id": "x"},
    "prompt_cache_key": "x",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low", "summary": "auto"},
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "safety_identifier": "x",
    "seed": 3,
    "service_tier": "flex",
    "speed": "fast",
    "stop": ["END"],
    "stop_sequences": ["END"],
    "store": True,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "suffix": "x",
    "system": "Be good.",
    "temperature": 0.5,
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tool_choice": "auto",
    "tools": [TOOL],
    "top_logprobs": 2,
    "top_p": 0.5,
    "truncation": "auto",
    "user": "x",
    "user_profile_id": "x",
    "verbosity": "low",
    "web_search_options": {"search_context_size": "low"},
    "workspace_id": "x",
}
"""A value of each parameter that asks for something."""
OTHERWISE: dict[tuple[str, str], Any] = {
    ("completions", "logprobs"): 2,
    ("responses", "tools"): [{"type": "function", "name": "look", "parameters": {}}],
    ("messages", "tool_choice"): {"type": "auto"},
    ("messages", "tools"): [{"name": "look", "input_schema": {}}],
}
"""Values of those that mean something else in one API."""


def table() -> dict[str, dict[str, str]]:
    """What the page says: of each parameter, by API, `served`, `ignored`, `refused` or `-`."""
    lists = re.findall(
        r"^\| (served|ignored|refused) \| (.*) \| (.*) \| (.*) \| (.*) \|$", PAGE.read_text(), re.MULTILINE
    )
    assert len(lists) == 3
    found: dict[str, dict[str, str]] = {}
    for said, *cells in lists:
        for api, cell in zip(APIS, cells, strict=True):
            for name in re.findall(r"`(\w+)`", cell):
                assert found.setdefault(name, dict.fromkeys(APIS, "-"))[api] == "-", f"{name} is there twice"
                found[name][api] = said
    return found


def parameters(api: str) -> set[str]:
    """Those of the installed packages `openai` and `anthropic`."""
    return {name for each in get_args(CLIENTS[api]) for name in each.__annotations__} - {"betas"}  # a header


@pytest.mark.parametrize("api", APIS)
def test_the_page_has_every_parameter(api: str) -> None:
    assert {name for name, said in table().items() if said[api] != "-"} == parameters(api) | NEWER.get(api, set())


@pytest.fixture
def directory(tokenizer_directory: Path, tmp_path: Path) -> Path:
    """A model's directory whose chat template a test writes."""
    return Path(shutil.copytree(tokenizer_directory, tmp_path / "model"))


@pytest.fixture
def knowing_chat(directory: Path) -> Chat:
    """A chat whose template reads an effort and a verbosity."""
    tools = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    messages = "{% for m in messages %}{{ m.role }}{{ m.content }}<end>{% endfor %}"
    template = "{{ reasoning_effort }}{{ verbosity }}" + tools + messages
    (directory / "chat_template.jinja").write_text(template)
    return Chat(directory)


CASES = [(api, name) for name, said in table().items() for api in APIS if said[api] != "-" and name not in LEAST[api]]


@pytest.mark.parametrize(("api", "name"), CASES)
async def test_the_gateway_does_what_the_page_says(gateway: Gateway, knowing_chat: Chat, api: str, name: str) -> None:
    said = table()[name][api]
    model = RecordingModel(knowing_chat, ["{}" if name == "response_format" else "one"] * 3)
    given = LEAST[api] | {name: OTHERWISE.get((api, name), VALUES[name])}
    if name == "top_logprobs" and api == "chat":
        given["logprobs"] = True
    if name == "stream_options":
        given["stream"] = True
    async with gateway.session(model) as session, aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        for fields in (given, LEAST[api]) if said == "ignored" else (given,):
            async with http.post(f"{session.base_url}/{PATHS[api]}", json=fields, headers=headers) as answer:
                status, text = answer.status, await answer.text()
            if said == "refused":
                assert status == 400
                assert (f'"param": "{name}"' if api != "messages" else f'"message": "{name} is ') in text
            else:
                assert status == 200, text
    if said == "ignored":  # the same tokens, sampled alike
        assert len(model.asked) == 2
        assert model.asked[0] == model.asked[1]
        assert model.turns[0].prompt_ids.tolist() == model.turns[1].prompt_ids.tolist()


async def test_an_effort_renders_the_prompt_and_is_a_branch_of_its_own(gateway: Gateway, knowing_chat: Chat) -> None:
    model = RecordingModel(knowing_chat, ["one", "two", "three"])
    async with gateway.session(model) as session, client_of(session) as client:
        hello: Any = {"role": "user", "content": "hello"}
        asked: Any = {"model": "any", "reasoning_effort": "high", "verbosity": "low"}
        answer = await client.chat.completions.create(messages=[hello], **asked)
        history: Any = [hello, answer.choices[0].message, hello]
        await client.chat.completions.create(messages=history, **asked)
        await client.chat.completions.create(messages=history, model="any", reasoning_effort="none")
    first, second, third = model.turns
    assert knowing_chat.decode(first.prompt_ids.tolist()).startswith("highlow")
    assert extends(second, first)
    assert not extends(third, first)
    assert knowing_chat.decode(third.prompt_ids.tolist()).startswith("none")
    kwargs = [each.chat_template_kwargs for each in model.asked if each is not None]
    assert kwargs == [{"reasoning_effort": "high", "verbosity": "low"}] * 2 + [{"reasoning_effort": "none"}]


async def test_an_effort_turns_thinking_on_and_off_unless_the_run_says_which(gateway: Gateway, directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ enable_thinking }}{{ messages[0].content }}")
    chat = Chat(directory)
    asked: Any = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
    model = RecordingModel(chat, ["one"] * 3)
    async with gateway.session(model) as session, client_of(session) as client:
        for effort in ("low", "none"):
            await client.chat.completions.create(**asked, reasoning_effort=effort)
    assert [chat.decode(turn.prompt_ids.tolist()) for turn in model.turns] == ["Truehello", "Falsehello"]
    fixed = RecordingModel(chat.with_template_kwargs({"enable_thinking": False}), ["one"])
    async with gateway.session(fixed) as session, client_of(session) as client:
        with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
            await client.chat.completions.create(**asked, reasoning_effort="high")


class ProbableModel(RecordingModel):
    """Has for each token itself and the next one as the most probable."""

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        turn = await super().generate(prompt_ids, sampling)
        assert isinstance(sampling, CallOverrides)
        if not sampling.alternatives:
            return turn
        ids = np.stack([turn.completion_ids, turn.completion_ids + 1], axis=1)
        values = np.asarray([[-0.5, -np.inf]] * len(turn.completion_ids), np.float32)
        return replace(turn, alternatives=Alternatives(ids, values))


@pytest.mark.parametrize("api", ["chat", "responses", "completions"])
async def test_many_probable_tokens_are_written_off_the_loop(
    gateway: Gateway, chat: Chat, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    write = responses._alternatives

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return write(*given)

    monkeypatch.setattr(responses, "_alternatives", noted)
    monkeypatch.setattr("counterpoint.environments.gateway.session.LONG_TEXT", 10)
    asked = (
        {"logprobs": 2}
        if api == "completions"
        else {"top_logprobs": 2, **({"logprobs": True} if api == "chat" else {})}
    )
    model = ProbableModel(chat, ["ab", "abcdefgh"])
    async with gateway.session(model) as session, aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        for _ in range(2):
            async with http.post(
                f"{session.base_url}/{PATHS[api]}", json=LEAST[api] | asked, headers=headers
            ) as answer:
                assert answer.status == 200, await answer.text()
    assert [each is threading.main_thread() for each in threads] == [True, False]


async def test_the_most_probable_tokens_have_openais_shape_and_leave_the_turn_as_it_is(
    gateway: Gateway, chat: Chat
) -> None:
    model = ProbableModel(chat, ["ab"] * 4)
    async with gateway.session(model) as session, client_of(session) as client:
        asked: Any = {"model": "any", "messages": [{"role": "user", "content": "hello"}], "logprobs": True}
        with_top = await client.chat.completions.create(**asked, top_logprobs=2)
        without = await client.chat.completions.create(**asked)
        response = await client.responses.create(model="any", input="hello", top_logprobs=2)
        completion = await client.completions.create(model="any", prompt="hello", logprobs=2)
    scores = with_top.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    first = scores.content[0]
    assert (first.token, first.logprob, first.bytes) == ("a", -0.5, [97])
    assert [(each.token, each.logprob, each.bytes) for each in first.top_logprobs] == [
        ("a", -0.5, [97]),
        ("b", -9999.0, [98]),
    ]
    assert without.choices[0].logprobs is not None
    assert without.choices[0].logprobs.content is not None
    assert without.choices[0].logprobs.content[0].top_logprobs == []
    message: Any = response.output[0]
    [part] = message.content
    assert [each.token for each in part.logprobs[0].top_logprobs] == ["a", "b"]
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.top_logprobs is not None
    assert completion.choices[0].logprobs.top_logprobs[0] == {"a": -0.5, "b": -9999.0}
    assert len({tuple(turn.completion_ids.tolist()) for turn in model.turns}) == 1
    assert all(turn.trained_tokens == len(turn.completion_ids) for turn in model.turns)


@pytest.mark.parametrize(("turns", "tokens"), [(16, 1250), (1, 20_000)])
def test_the_most_probable_tokens_of_one_request_are_bounded(turns: int, tokens: int) -> None:
    sampling = SamplingConfig(max_tokens=100_000)
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20, "n": turns}
    text = {"prompt": ["x"] * turns, "logprobs": 20}

    def read_chat(tokens: int) -> Asked:
        return chat_request(chat | {"max_tokens": tokens}, sampling, cast(Chat, None), agent_sampling=True).asked

    def read_text(tokens: int) -> Asked:
        return completion_request(text | {"max_tokens": tokens}, sampling, 100, agent_sampling=True).asked

    for read in (read_chat, read_text):
        assert read(tokens).overrides.alternatives == 20
        with pytest.raises(GatewayRefused) as refused:
            read(tokens + 1)
        assert refused.value.parameter == "max_tokens"


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat", {"frequency_penalty": False}),
        ("chat", {"presence_penalty": False}),
        ("chat", {"stream_options": {"include_usage": 1}}),
        ("completions", {"best_of": True}),
        ("completions", {"echo": 0}),
        ("responses", {"background": 0}),
    ],
    ids=str,
)
async def test_a_boolean_is_no_number_and_a_number_no_boolean(
    gateway: Gateway, knowing_chat: Chat, api: str, fields: dict[str, Any]
) -> None:
    async with gateway.session(RecordingModel(knowing_chat, ["one"])) as session, aiohttp.ClientSession() as http:
        url, headers = f"{session.base_url}/{PATHS[api]}", {"Authorization": f"Bearer {session.api_key}"}
        async with http.post(url, json=LEAST[api] | fields, headers=headers) as answer:
            assert answer.status == 400
