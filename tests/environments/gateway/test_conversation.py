"""Histories become prompts: what continues a turn has its tokens, what does not is a branch of its own."""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import processors

from counterpoint.environments.base import Reply, ToolCall
from counterpoint.environments.chat import LONG_TEXT, Chat, Tool
from counterpoint.environments.gateway import Gateway
from counterpoint.environments.gateway.conversation import Histories
from counterpoint.models.tiny_tokenizer import write_tokenizer
from counterpoint.transport.records import Turn
from tests.environments.gateway.models import RecordingModel, client_of, extends

TEMPLATE = (
    "{{ tools | tojson if tools }}{% for message in messages %}<|{{ message.role }}|>{{ message.reasoning_content }}"
    "{{ message.content }}{{ message.tool_calls | tojson if message.tool_calls }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
HELLO: Any = {"role": "user", "content": "hello"}
MORE: Any = {"role": "user", "content": "more"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """With a template that reads tools, and writes them before everything else."""
    directory = tmp_path_factory.mktemp("tools")
    write_tokenizer(directory, longest=4096)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return Chat(directory)


async def asked(gateway: Gateway, model: RecordingModel, *histories: list[Any], **fields: Any) -> list[Any]:
    """Asks once for each history, in one session. A number in a history is that answer's message, as the client gives it."""
    answers: list[Any] = []
    async with gateway.session(model) as session, client_of(session) as client:
        for history in histories:
            messages = [answers[each] if isinstance(each, int) else each for each in history]
            answer = await client.chat.completions.create(model="any", messages=messages, **fields)
            answers.append(answer.choices[0].message)
    return answers


@pytest.mark.slow  # the client's first call builds its models
async def test_a_call_of_a_tool_is_continued_however_the_client_writes_it(gateway: Gateway, chat: Chat) -> None:
    model = RecordingModel(chat, ["call:x y", "one", "two", "three"])
    first: Any = {
        "role": "assistant",
        "tool_calls": [{"id": "call_1", "function": {"name": "look", "arguments": '{ "at" : "x y" }'}}],
    }
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "seen"}]}
    answers = await asked(
        gateway, model, [HELLO], [HELLO, 0, result], [HELLO, first, result], [HELLO, 0, result, 1, MORE], tools=TOOLS
    )
    assert answers[0].tool_calls[0].function.arguments == '{"at":"x y"}'
    assert answers[0].reasoning_content == "because"
    opening, second, third, fourth = model.turns
    assert extends(second, opening)
    assert extends(third, opening)
    assert extends(fourth, second)
    assert model.parsed == [TOOLS] * 4


@pytest.mark.parametrize("cut", ["call:cut", "bad:cut", "just cut"])
async def test_a_turn_that_was_cut_says_length_also_with_calls(gateway: Gateway, chat: Chat, cut: str) -> None:
    model = RecordingModel(chat, [cut])
    async with gateway.session(model) as session, client_of(session) as client:
        answer = await client.chat.completions.create(model="any", messages=[HELLO], tools=TOOLS)
    assert answer.choices[0].finish_reason == "length"
    assert bool(answer.choices[0].message.tool_calls) == cut.startswith("call")
    assert answer.choices[0].message.content == (None if cut.startswith("call") else cut)


async def test_malformed_calls_are_text(gateway: Gateway, chat: Chat) -> None:
    [answer] = await asked(gateway, RecordingModel(chat, ["bad:{"]), [HELLO], tools=TOOLS)
    assert answer.content == "bad:{"
    assert answer.tool_calls is None


@pytest.mark.parametrize(
    ("at", "sent"), [("2", True), (str(2**70), True), ('"\\ud800"', False), ("[" * 65 + "]" * 65, False)]
)
async def test_calls_that_cannot_be_sent_are_text(gateway: Gateway, chat: Chat, at: str, sent: bool) -> None:
    class Calling(RecordingModel):
        async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
            return Reply("", "", (ToolCall("call_1", "look", {"at": json.loads(at)}),))

    [answer] = await asked(gateway, Calling(chat, ["look there"]), [HELLO], tools=TOOLS)
    assert bool(answer.tool_calls) == sent
    assert answer.content == (None if sent else "look there")


async def test_without_choice_of_tools_none_is_called_and_the_branch_goes_on(gateway: Gateway, chat: Chat) -> None:
    model = RecordingModel(chat, ["call:x", "call:y"])
    async with gateway.session(model) as session, client_of(session) as client:
        first = (await client.chat.completions.create(model="any", messages=[HELLO], tools=TOOLS)).choices[0].message
        messages: Any = [HELLO, first, {"role": "tool", "tool_call_id": "call_1", "content": "z"}]
        answer = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content == "call:y"
    assert extends(model.turns[1], model.turns[0])


@pytest.mark.parametrize(
    "history",
    [
        [{"role": "assistant", "content": "an edited answer"}, MORE],
        [MORE],
        [{"role": "system", "content": "another"}, HELLO, 0, MORE],
        [HELLO, {"role": "assistant", "content": "yes", "reasoning_content": "an edited thought"}, MORE],
    ],
)
async def test_another_history_is_a_branch_of_its_own(gateway: Gateway, chat: Chat, history: list[Any]) -> None:
    model = RecordingModel(chat, ["yes", "no"])
    answers = await asked(gateway, model, [HELLO], history)
    assert not extends(model.turns[1], model.turns[0])
    messages = [{"role": "assistant", "content": "yes"} if each == 0 else each for each in history]
    assert model.turns[1].prompt_ids.tolist() == chat.start(messages)
    assert answers[1].content == "no"


async def test_other_tools_are_a_branch_of_their_own(gateway: Gateway, chat: Chat) -> None:
    model = RecordingModel(chat, ["yes", "no"])
    async with gateway.session(model) as session, client_of(session) as client:
        answer = await client.chat.completions.create(model="any", messages=[HELLO])
        messages: Any = [HELLO, answer.choices[0].message, MORE]
        await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
    assert not extends(model.turns[1], model.turns[0])


async def test_the_longest_known_history_is_continued_and_a_shortened_one_is_not(gateway: Gateway, chat: Chat) -> None:
    model = RecordingModel(chat, ["a", "b", "c", "d"])
    await asked(gateway, model, [HELLO], [HELLO, 0, MORE], [HELLO, 0, MORE, 1, MORE], [1, MORE])
    first, second, third, fourth = model.turns
    assert extends(second, first)
    assert extends(third, second)
    assert not extends(fourth, second)


async def test_a_long_history_is_encoded_beside_the_loop(gateway: Gateway, chat: Chat) -> None:
    model = RecordingModel(chat, ["a", "b", "c"])
    long: Any = {"role": "user", "content": "a long text, " * (LONG_TEXT // 10)}
    await asked(gateway, model, [long], [long, 0, MORE])
    assert model.turns[0].prompt_ids.tolist() == chat.start([long])
    assert extends(model.turns[1], model.turns[0])


@pytest.mark.parametrize("where", ["content", "arguments", "reasoning", "tools"])
async def test_whatever_is_long_is_encoded_beside_the_loop(
    gateway: Gateway, chat: Chat, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    threads: list[threading.Thread] = []

    def start(messages: Any, tools: Any = ()) -> array[int]:
        threads.append(threading.current_thread())
        return array("i", [1])

    monkeypatch.setattr(chat, "start_packed", start)
    long = "a" * (LONG_TEXT + 1)
    call = {"name": "look", "arguments": '{"at": "%s"}' % (long if where == "arguments" else "here")}
    said: Any = {
        "role": "assistant",
        "content": long if where == "content" else "b",
        "reasoning_content": long if where == "reasoning" else "c",
        "tool_calls": [{"id": "1", "type": "function", "function": call}],
    }
    look = {"name": "look", "description": long if where == "tools" else "d"}
    await asked(gateway, RecordingModel(chat, ["x"]), [HELLO, said], tools=[{"type": "function", "function": look}])
    assert threads
    assert threading.main_thread() not in threads


async def test_sessions_know_nothing_of_each_other(gateway: Gateway, chat: Chat) -> None:
    model = RecordingModel(chat, ["a", "b"])
    [answer] = await asked(gateway, model, [HELLO])
    await asked(gateway, model, [HELLO, answer, MORE])
    assert model.turns[1].prompt_ids.tolist() == chat.start([HELLO, {"role": "assistant", "content": "a"}, MORE])


async def test_a_template_that_cannot_continue_begins_again(gateway: Gateway, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, longest=1024)
    # It drops what the assistant said before the last user's message.
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages if message.role == 'user' %}<|user|>{{ message.content }}<|end|>{% endfor %}<|assistant|>"
    )
    model = RecordingModel(Chat(tmp_path), ["a", "b"])
    await asked(gateway, model, [HELLO], [HELLO, 0, MORE])
    assert model.turns[1].prompt_ids.tolist() == model.chat.encode(
        "<|user|>hello<|end|><|user|>more<|end|><|assistant|>"
    )


@pytest.mark.parametrize("written", ["once ", "once STOP"])
async def test_a_stop_string_that_ended_a_turn_may_be_written_back(gateway: Gateway, chat: Chat, written: str) -> None:
    model = RecordingModel(chat, ["once STOP", "a"])
    [answer, _] = await asked(
        gateway, model, [HELLO], [HELLO, {"role": "assistant", "content": written}, MORE], stop="STOP"
    )
    assert answer.content == "once "
    assert extends(model.turns[1], model.turns[0])


@pytest.mark.parametrize(
    ("stop", "said", "continued", "kept"),
    [
        (None, "upon", "once upon<|end|> a time", True),
        (None, "upon", "once upon a time", False),
        (["STOP"], "upon STOP", "once upon STOP<|end|> a time", True),
        (["STOP"], "upon STOP", "once upon a time", False),
    ],
)
async def test_a_text_continues_the_turn_that_it_repeats(
    gateway: Gateway, chat: Chat, stop: list[str] | None, said: str, continued: str, kept: bool
) -> None:
    model = RecordingModel(chat, [said, "x"])
    async with gateway.session(model) as session, client_of(session) as client:
        answer = await client.completions.create(model="any", prompt="once ", stop=stop)
        assert answer.choices[0].text == said.removesuffix("STOP")
        await client.completions.create(model="any", prompt=continued)
    assert extends(model.turns[1], model.turns[0]) == kept
    assert chat.transcribe([model.turns[1].prompt_ids.tolist()]) == [continued]


async def test_a_text_begins_as_the_tokenizer_says_and_its_continuation_does_not(
    gateway: Gateway, tmp_path: Path
) -> None:
    tokenizer = write_tokenizer(tmp_path, longest=1024)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 258)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    chat = Chat(tmp_path)
    model = RecordingModel(chat, ["upon", "x", "y"])
    async with gateway.session(model) as session, client_of(session) as client:
        answer = await client.completions.create(model="any", prompt="once ")
        await client.completions.create(model="any", prompt="once upon<|end|> a time")
        await client.completions.create(model="any", prompt=chat.encode("once "))
    assert [turn.prompt_ids.tolist() for turn in model.turns] == [
        tokenizer.encode("once ").ids,
        [258, *chat.encode("once upon<|end|> a time")],
        chat.encode("once "),
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("once ") + 1
    assert extends(model.turns[1], model.turns[0])
    assert model.chat.start([HELLO]) == chat.encode("<|user|>hello<|end|><|assistant|>")  # a template writes its own


def test_of_the_turns_that_a_text_repeats_one_is_encoded(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations, text = Histories(chat), "once"
    for _ in range(50):
        ids = np.asarray(chat.encode(text), np.int32)
        turn = Turn(ids, np.asarray(chat.encode(" upon"), np.int32), np.zeros(1, np.float32), 0, "length")
        conversations.remember_text(text, " upon", "", turn)
        text += " upon"
    encoded: list[str] = []
    encode = chat.encode

    def noted(text: str) -> list[int]:
        encoded.append(text)
        return encode(text)

    monkeypatch.setattr(chat, "encode", noted)
    assert chat.transcribe([conversations.text_prompt(text + " a time")]) == [text + " a time"]
    assert encoded == [" a time"]


def turn_of(prompt: list[int], completion: list[int]) -> Turn:
    values = np.zeros(len(completion), np.float32)
    return Turn(np.asarray(prompt, np.int32), np.asarray(completion, np.int32), values, 0, "stop")


def test_the_longest_known_history_is_continued(chat: Chat) -> None:
    """With its turn's tokens, which are not those that its text has when it is encoded again."""
    conversations, answer = Histories(chat), {"role": "assistant", "content": "well"}
    long = [HELLO, answer, MORE, answer, MORE]
    for end, turn in ((1, turn_of([1, 2], [3])), (3, turn_of([1, 2, 3, 9], [7, 8]))):
        conversations.remember(long[:end], [], answer, turn)
    assert conversations.prompt(long, [])[:6].tolist() == [1, 2, 3, 9, 7, 8]
    assert conversations.prompt([*long[:3], MORE], [])[:3].tolist() == [1, 2, 3]
    assert conversations.prompt([HELLO, MORE], [])[:3].tolist() != [1, 2, 3]


def test_histories_are_apart_by_the_variables_of_the_template(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "with_template_kwargs", lambda variables: chat)
    conversations, answer = Histories(chat), {"role": "assistant", "content": "well"}
    efforts: list[dict[str, Any]] = [{}, {"effort": "low"}, {"effort": "high"}]
    for number, each in enumerate(efforts):
        turn = turn_of([1, number], [3])
        conversations.rendered_with(each).remember([HELLO], [], answer, turn)
    for number, each in enumerate(efforts):
        prompt = conversations.rendered_with(dict(each)).prompt([HELLO, answer, MORE], [])
        assert prompt[:3].tolist() == [1, number, 3]


async def test_each_choice_of_a_request_is_a_turn(gateway: Gateway, chat: Chat) -> None:
    model = RecordingModel(chat, ["a", "b", "c"])
    async with gateway.session(model) as session, client_of(session) as client:
        answer = await client.chat.completions.create(model="any", messages=[HELLO], n=3)
        assert [each.message.content for each in answer.choices] == ["a", "b", "c"]
        assert sorted(map(id, session.turns)) == sorted(map(id, model.turns))
        assert len(session.turns) == 3


async def test_no_choice_of_a_request_is_trained_of_which_one_fails(gateway: Gateway, chat: Chat) -> None:
    """The agent reads none of them, and its next request does not go on from one."""
    model = RecordingModel(chat, ["kept", "a", "b"])  # the third choice finds no answer left
    async with gateway.session(model) as session, client_of(session) as client:
        await client.chat.completions.create(model="any", messages=[HELLO])
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(model="any", messages=[HELLO], n=3)
        assert len(session.turns) == 1
    assert [any(turn.untrained) for turn in model.turns] == [False, True, True]


async def test_prompts_of_token_ids_are_taken_as_they_are(gateway: Gateway, chat: Chat) -> None:
    model = RecordingModel(chat, ["a", "b", "c", "d"])
    async with gateway.session(model) as session, client_of(session) as client:
        answer = await client.completions.create(model="any", prompt=[[10, 11], [12]], n=2, logprobs=0)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 3
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [turn.prompt_ids.tolist() for turn in model.turns] == [[10, 11], [10, 11], [12], [12]]


async def test_messages_at_which_the_template_fails_are_refused(gateway: Gateway, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, longest=1024)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content + 1 if messages[0].content }}")
    with pytest.raises(openai.BadRequestError, match="TypeError"):
        await asked(gateway, RecordingModel(Chat(tmp_path), []), [HELLO])
