"""The endpoint over real sockets, with the stock `openai` client: answers, streams, limits, keys, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import openai
import pytest
import uvloop

from counterpoint.environments.chat import Chat
from counterpoint.environments.gateway import Gateway, Limits
from counterpoint.environments.gateway.agent import AgentEnvironment
from counterpoint.environments.sampling import SamplingConfig, SamplingOverrides
from counterpoint.environments.scripted import ScriptedModel
from counterpoint.orchestrator.rollouts.branching import FACTOR, SAMPLES, branch_metrics, in_words
from counterpoint.orchestrator.rollouts.trajectories import merge_rollout, merge_turns
from counterpoint.transport.records import Rollout, Turn
from tests.environments.gateway.models import FailingModel, RecordingModel, WaitingModel, client_of, extends
from tests.support.polling import until


@asynccontextmanager
async def closing(gateway: Gateway) -> AsyncIterator[Gateway]:
    try:
        yield gateway
    finally:
        await gateway.close()


HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.mark.slow  # the first use of the client builds its models
async def test_a_conversation_of_the_stock_client_is_one_branch(gateway: Gateway, chat: Chat) -> None:
    model = ScriptedModel(chat, ["one", "two", "three"])
    async with gateway.session(model) as session, client_of(session) as client:
        messages = list(HELLO)
        for said in ("one", "two", "three"):
            answer = await client.chat.completions.create(model="any", messages=messages)
            assert answer.choices[0].message.content == said
            assert answer.choices[0].finish_reason == "stop"
            messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
    first, second, third = model.turns
    assert extends(second, first)
    assert extends(third, second)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(third.prompt_ids)
    assert answer.usage.completion_tokens == len(third.completion_ids)
    assert session.turns == model.turns
    assert session.last_reply is not None
    assert session.last_reply.content == "three"


async def test_a_stream_has_the_same_content(gateway: Gateway, chat: Chat) -> None:
    model = ScriptedModel(chat, ["a stream", "of text"])
    async with gateway.session(model) as session, client_of(session) as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="any", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
        ]
        texts = [
            chunk async for chunk in await client.completions.create(model="any", prompt="x", stream=True, max_tokens=3)
        ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "a stream"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None, "stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(model.turns[0].completion_ids)
    assert "".join(chunk.choices[0].text for chunk in texts) == "of text"


async def test_several_choices_are_turns_from_one_prompt(gateway: Gateway, chat: Chat) -> None:
    model = ScriptedModel(chat, ["a", "b", "c"])
    async with gateway.session(model) as session, client_of(session) as client:
        answer = await client.chat.completions.create(model="any", messages=HELLO, n=3, logprobs=True)
    assert sorted(choice.message.content or "" for choice in answer.choices) == ["a", "b", "c"]
    assert len({turn.prompt_ids.tobytes() for turn in model.turns}) == 1
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [each.logprob for each in logprobs.content] == [-0.5, -0.5]


async def test_an_agent_lowers_and_adds_but_does_not_sample_otherwise(gateway: Gateway, chat: Chat) -> None:
    model = RecordingModel(chat, ["before END after", "x"])
    model.sampling = SamplingConfig(max_tokens=100, stop=["own"])
    async with gateway.session(model) as session, client_of(session) as client:
        answer = await client.chat.completions.create(
            model="any", messages=HELLO, max_tokens=7, stop=["END"], temperature=0.2, top_p=0.5
        )
        await client.chat.completions.create(model="any", messages=HELLO, max_completion_tokens=1000)
    first, second = model.asked
    assert first is not None
    assert second is not None
    assert first.model_dump(exclude_defaults=True) == {"max_tokens": 7, "stop": ["own", "END"]}
    assert second.model_dump(exclude_defaults=True) == {"max_tokens": 100}
    assert answer.choices[0].message.content == "before "


async def test_an_agent_may_sample_where_the_environment_says_so(chat: Chat) -> None:
    model = RecordingModel(chat, ["x"])
    async with (
        closing(Gateway(agent_sampling=True)) as gateway,
        gateway.session(model) as session,
        client_of(session) as client,
    ):
        await client.chat.completions.create(model="any", messages=HELLO, temperature=0, top_p=0.5)
    assert model.asked[0] is not None
    assert model.asked[0].model_dump(exclude_defaults=True) == {"temperature": 0.01, "top_p": 0.5, "max_tokens": 256}


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"extra_body": {"temperatur": 1}}, "temperatur"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages[0].audio"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "any"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_what_cannot_be_honoured_is_refused(
    gateway: Gateway, chat: Chat, fields: dict[str, Any], parameter: str
) -> None:
    model = ScriptedModel(chat, [])
    async with gateway.session(model) as session, client_of(session) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**{"model": "any", "messages": HELLO} | fields)
    assert refused.value.param == parameter
    assert parameter in str(refused.value)
    assert len(session.errors) == 1


async def test_neutral_and_ignored_fields_are_taken(gateway: Gateway, chat: Chat) -> None:
    async with gateway.session(ScriptedModel(chat, ["x"])) as session, client_of(session) as client:
        await client.chat.completions.create(
            model="any", messages=HELLO, seed=1, user="me", metadata={"a": "b"}, store=True, frequency_penalty=0,
            logit_bias={}, response_format={"type": "text"}, parallel_tool_calls=True, tool_choice="auto",
        )  # fmt: skip
        assert [model.id async for model in client.models.list()] == ["policy"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("the prompt is too long"), 400), (RuntimeError("gone"), 503), (NotImplementedError("no"), 501)],
)
async def test_a_failed_call_is_told(gateway: Gateway, chat: Chat, error: Exception, status: int) -> None:
    async with gateway.session(FailingModel(chat, error)) as session, client_of(session) as client:
        with pytest.raises(openai.APIStatusError, match=str(error)) as told:
            await client.chat.completions.create(model="any", messages=HELLO)
    assert told.value.status_code == status


class HalfFailingModel(ScriptedModel):
    """Answers the first choice of a request, and fails at the second, or waits until it is cancelled."""

    def __init__(self, chat: Chat, *, waits: bool) -> None:
        super().__init__(chat, ["never read", "read"])
        self._waits = waits
        self.begun = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        self.begun += 1
        if self.begun == 2 and self._waits:
            await asyncio.Event().wait()
        if self.begun == 2:
            raise RuntimeError("gone")
        return await super().generate(prompt_ids, sampling)


@pytest.mark.parametrize("waits", [False, True])
async def test_what_no_agent_has_read_is_not_trained(gateway: Gateway, chat: Chat, waits: bool) -> None:
    model = HalfFailingModel(chat, waits=waits)
    async with gateway.session(model) as session, client_of(session) as client:
        asking = asyncio.create_task(client.chat.completions.create(model="any", messages=HELLO, n=2))
        await until(lambda: model.begun == 2, "the second choice")
        if waits:
            asking.cancel()
        with pytest.raises(asyncio.CancelledError if waits else openai.APIStatusError):
            await asking
        await until(lambda: model.turns[0].trained_tokens == 0, "the mask of what was not read")
        await client.chat.completions.create(model="any", messages=HELLO)
    assert session.turns == model.turns[1:]
    assert model.turns[1].trained_tokens == len(model.turns[1].completion_ids)


async def test_keys_of_others_and_of_nobody_are_refused(gateway: Gateway, chat: Chat) -> None:
    mine, others = ScriptedModel(chat, ["x"]), ScriptedModel(chat, [])
    async with gateway.session(mine) as own, gateway.session(others) as other:
        for key in (other.api_key, own.api_key[:-1], "x", "é"):
            async with aiohttp.ClientSession() as client:
                url, headers = f"{own.base_url}/chat/completions", {"Authorization": f"Bearer {key}"}
                async with client.post(url, json={"messages": HELLO}, headers=headers) as answer:
                    assert answer.status == 401
                    assert (await answer.json())["error"]["code"] == "invalid_api_key"
        async with aiohttp.ClientSession() as client:
            async with client.post(f"{own.base_url}/chat/completions", json={"messages": HELLO}) as answer:
                assert answer.status == 401
            headers = {"Authorization": f"Bearer {own.api_key}"}
            async with client.get(f"{own.base_url}/elsewhere", headers=headers) as answer:
                assert answer.status == 404
            async with client.get(f"{own.base_url}/completions", headers=headers) as answer:
                assert answer.status == 405
        async with client_of(own) as right:
            await right.chat.completions.create(model="any", messages=HELLO)
    async with client_of(own) as late:
        with pytest.raises(openai.APIStatusError) as gone:
            await late.chat.completions.create(model="any", messages=HELLO)
    assert gone.value.status_code == 410


@pytest.mark.parametrize("codings", [["gzip"], ["deflate"], ["br"], ["identity", "gzip"], ["identity, gzip"]])
async def test_a_compressed_body_is_refused_after_the_key_and_never_decompressed(
    gateway: Gateway, chat: Chat, codings: list[str]
) -> None:
    """Nothing of it is read: what is not even compressed is refused alike."""
    body = b"this is none of them" * 50_000
    async with gateway.session(ScriptedModel(chat, [])) as session, aiohttp.ClientSession() as client:
        for key, status in (("x", 401), (session.api_key, 415)):
            headers = [("Authorization", f"bearer {key}"), *(("Content-Encoding", each) for each in codings)]
            async with client.post(f"{session.base_url}/chat/completions", data=body, headers=headers) as answer:
                assert answer.status == status
                assert status == 401 or "compressed" in (await answer.json())["error"]["message"]


async def test_the_end_of_the_rollout_ends_its_requests(gateway: Gateway, chat: Chat) -> None:
    model = WaitingModel(chat, [])
    async with gateway.session(model) as session, client_of(session) as client:
        asking = asyncio.create_task(client.chat.completions.create(model="any", messages=HELLO, n=2))
        await until(lambda: model.begun == 2, "the calls")
        await session.end()
        with pytest.raises(openai.APIStatusError) as gone:
            await asking
    assert gone.value.status_code == 410
    assert model.cancelled == 2
    assert session.turns == []


async def test_a_body_that_ends_after_the_rollout_calls_nothing(gateway: Gateway, chat: Chat) -> None:
    model = ScriptedModel(chat, ["x"])
    body = b'{"prompt": "x"}'
    async with asyncio.timeout(60), gateway.session(model) as session:
        port, path = session.base_url.split(":")[2].split("/", 1)
        head = f"POST /{path}/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.api_key}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        try:
            writer.write(f"{head}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            assert b"100 Continue" in await reader.readline()
            await session.end()
            writer.write(body)
            answer = await reader.readuntil(b"}}")
        finally:
            writer.close()
            await writer.wait_closed()
    assert b" 410 " in answer
    assert model.turns == []


async def test_a_client_that_disconnects_cancels_its_call(gateway: Gateway, chat: Chat) -> None:
    model = WaitingModel(chat, [])
    async with gateway.session(model) as session, client_of(session) as client:
        asking = asyncio.create_task(client.chat.completions.create(model="any", messages=HELLO))
        await until(lambda: model.begun == 1, "the call")
        asking.cancel()
        await until(lambda: model.cancelled == 1, "its cancellation")
        with pytest.raises(asyncio.CancelledError):
            await asking


@pytest.mark.parametrize(
    "parameters",
    [
        {"$schema": "http://json-schema.org/schema#", "type": "object"},
        {"type": "object", "properties": {"path": {"type": "string", "required": True, "description": None}}},
        {"type": "OBJECT", "properties": {"name": {"type": "STRING", "pattern": r"^\w{,5}\Z"}}},
        {"$ref": "https://example.com/schema.json"},
    ],
)
async def test_a_tool_is_offered_whatever_dialect_its_schema_has(chat: Chat, parameters: dict[str, Any]) -> None:
    """The agent checks its calls itself; the model only reads the schema."""
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    gateway = Gateway()
    async with closing(gateway), gateway.session(ScriptedModel(chat, ["one"])) as session, client_of(session) as client:
        answer = await client.chat.completions.create(model="any", messages=HELLO, tools=[tool])
    assert answer.choices[0].message.content == "one"


async def test_requests_wait_for_their_turn_and_few_are_refused(chat: Chat) -> None:
    gateway, model = Gateway(Limits(requests_at_once=2, requests_waiting=3)), WaitingModel(chat, "abcd")
    async with closing(gateway), gateway.session(model) as session, client_of(session) as client:
        asking = [asyncio.create_task(client.chat.completions.create(model="any", messages=HELLO)) for _ in range(5)]
        await until(lambda: (session._open, model.begun) == (5, 2), "the requests")
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="any", messages=HELLO)
        assert refused.value.response.headers["Retry-After"] == "1"
        asking.pop().cancel()  # a client that has gone waits no more
        await until(lambda: session._open == 4, "its end")
        model.gate.set()
        await asyncio.gather(*asking)
        assert (model.begun, session._open) == (4, 0)


async def test_what_waits_is_told_of_the_rollouts_end(chat: Chat) -> None:
    gateway, model = Gateway(Limits(requests_at_once=1)), WaitingModel(chat, "abc")
    async with closing(gateway), gateway.session(model) as session, client_of(session) as client:
        asking = [asyncio.create_task(client.chat.completions.create(model="any", messages=HELLO)) for _ in range(2)]
        await until(lambda: (session._open, model.begun) == (2, 1), "the requests")
        await session.end()
        for each in asking:
            with pytest.raises(openai.APIStatusError) as ended:
                await each
            assert ended.value.status_code == 410
        assert model.begun == 1


async def test_requests_at_once_and_turns_are_bounded(chat: Chat) -> None:
    gateway, model = Gateway(Limits(requests_at_once=2, requests_waiting=0, turns=3)), WaitingModel(chat, "abc")
    async with closing(gateway), gateway.session(model) as session, client_of(session) as client:
        asking = [
            asyncio.create_task(client.chat.completions.create(model="any", messages=HELLO, n=count))
            for count in (1, 2)
        ]
        await until(lambda: model.begun == 3, "the calls")
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="any", messages=HELLO)
        model.gate.set()
        await asyncio.gather(*asking)
        with pytest.raises(openai.PermissionDeniedError, match="at most 3 are made"):
            await client.chat.completions.create(model="any", messages=HELLO)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"x" * (2**19 + 1), 413),
        (b"[" * 2**19, 413),
        (b"{", 400),
        (b"[]", 400),
        (b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}", 400),
        (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
        (b'{"messages": "\\ud800"}', 400),
    ],
)
async def test_bodies_are_bounded_before_they_are_parsed(chat: Chat, body: bytes, status: int) -> None:
    gateway = Gateway(Limits(body_bytes=2**19))
    async with (
        closing(gateway),
        gateway.session(ScriptedModel(chat, [])) as session,
        aiohttp.ClientSession() as client,
    ):
        headers = {"Authorization": f"Bearer {session.api_key}"}
        for data in (body, _in_chunks(body)):
            async with client.post(f"{session.base_url}/completions", data=data, headers=headers) as answer:
                assert answer.status == status
                assert (await answer.json())["error"]["type"] == "invalid_request_error"


async def _in_chunks(body: bytes) -> Any:
    for start in range(0, len(body), 65536):
        yield body[start : start + 65536]


async def test_a_session_after_the_close_serves_again(gateway: Gateway, chat: Chat) -> None:
    for _ in range(2):
        async with gateway.session(ScriptedModel(chat, ["x"])) as session, client_of(session) as client:
            await client.chat.completions.create(model="any", messages=HELLO)
        await gateway.close()


async def closed(reader: asyncio.StreamReader) -> bool:
    with suppress(ConnectionResetError):
        return await reader.read() == b""
    return True


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_strangers_and_each_rollout_have_a_share_of_the_connections(
    run: Any, chat: Chat, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("counterpoint.environments.gateway.server.MOST_CONNECTIONS", 4)

    async def connect() -> None:
        gateway = Gateway()
        async with (
            closing(gateway),
            gateway.session(ScriptedModel(chat, ["x", "y"])) as session,
            gateway.session(ScriptedModel(chat, ["z"])) as another,
            client_of(session) as client,
            client_of(another) as other,
            client_of(session) as greedy,
            asyncio.timeout(60),
        ):
            await client.chat.completions.create(model="any", messages=HELLO)  # it keeps one
            port = int(session.base_url.split(":")[2].split("/")[0])
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            assert await closed(silent[0][0])
            await other.chat.completions.create(model="any", messages=HELLO)
            assert await closed(silent[1][0])
            with pytest.raises(openai.RateLimitError):
                await greedy.with_options(max_retries=0).chat.completions.create(model="any", messages=HELLO)
            await client.chat.completions.create(model="any", messages=HELLO)
            for _, writer in silent:
                writer.close()

    run(connect())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_agent_runs_on_the_daemon_s_loop(chat: Chat) -> None:
    environment = AgentEnvironment(command=["sh", "-c", "echo 1; echo 2 >&2; exit 3"], data={"rows": [{"prompt": "x"}]})

    async def play() -> None:
        async with closing(environment._gateway):
            await environment.rollout(environment.example(0), ScriptedModel(chat, []), {})

    with pytest.raises(RuntimeError, match=r"exit code 3\. Its errors: 2"):
        uvloop.run(play())


@pytest.mark.slow
@pytest.mark.parametrize("strips", [True, False])
async def test_a_client_that_strips_thinking_multiplies_samples_and_tokens(
    gateway: Gateway, chat: Chat, strips: bool
) -> None:
    thought, turns = "<think>" + "so " * 5 + "</think>", 20
    model = ScriptedModel(chat, [f"{thought}answer {index}" for index in range(turns)])
    async with gateway.session(model) as session, client_of(session) as client:
        messages = list(HELLO)
        for _ in range(turns):
            answer = await client.chat.completions.create(model="any", messages=messages)
            content = answer.choices[0].message.content or ""
            messages += [
                {"role": "assistant", "content": content.rpartition("</think>")[2] if strips else content},
                {"role": "user", "content": "go on"},
            ]
    rollout = Rollout("0-0", 0, "agent", 0, model.turns, reward=1.0)
    merge_turns(rollout)
    line = branch_metrics([rollout])
    samples = [len(sample.token_ids_T) for sample in merge_rollout(rollout)]
    assert line == {SAMPLES: len(samples), FACTOR: pytest.approx(sum(samples) / max(samples))}
    assert len(samples) == (turns if strips else 1)
    assert bool(in_words([line])) is strips
