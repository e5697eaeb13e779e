"""A tool's result reaches the model as its template writes it, through tools and gateway alike, or the template is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.base import OnePolicy, Reply, ToolCall
from counterpoint.environments.chat import Chat, Message, Tool
from counterpoint.environments.chat_marks import alike
from counterpoint.environments.demonstrations import demonstrations_of
from counterpoint.environments.gateway.conversation import Histories
from counterpoint.environments.sampling import SamplingConfig, SamplingOverrides
from counterpoint.environments.tools.definition import ToolFunction
from counterpoint.environments.tools.play import play_with_tools
from counterpoint.transport.records import Turn
from tests.environments.templates.at_hand import TEMPLATES, ends_of, model_directory
from tests.support.rollouts import make_turn

pytestmark = pytest.mark.slow

TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "Where."}}},
        },
    }
    for name in ("look", "add")
]
USER, MORE = {"role": "user", "content": "go"}, {"role": "user", "content": "and more"}
TEXT = "Let me see."


def calls(*names: str, first: int = 1, arguments: Mapping[str, Any] | None = None, **fields: str) -> dict[str, Any]:
    """An assistant's message that calls."""
    made = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": name, "arguments": {"place": 'a "b" é'} if arguments is None else dict(arguments)},
        }
        for number, name in enumerate(names, first)
    ]
    return {"role": "assistant", "content": "", **fields, "tool_calls": made}


def result(number: int, name: str = "look", content: str = "") -> Message:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": name, "content": content or f"seen {number}"}


@dataclass(frozen=True)
class Case:
    """A conversation: what comes before a turn, the turn, and what follows it."""

    said: dict[str, Any]
    following: Sequence[Message]
    before: Sequence[Message] = (USER,)


CASES = {
    "one call": Case(calls("look"), [result(1)]),
    "two parallel calls": Case(calls("look", "add"), [result(1), result(2, "add")]),
    "results in another order": Case(calls("look", "add"), [result(2, "add"), result(1)]),
    "no arguments": Case(calls("look", arguments={}), [result(1)]),
    "two results in a row": Case(calls("look"), [result(1), result(1, content="seen again")]),
    "text before the call": Case(calls("look", content=TEXT), [result(1)]),
    "reasoning before the call": Case(calls("look", reasoning_content="hm"), [result(1)]),
    "a result without a name": Case(calls("look"), [{each: result(1)[each] for each in ("role", "tool_call_id", "content")}]),
    "a second round": Case(calls("add", first=2), [result(2, "add")], [USER, calls("look"), result(1)]),
    "a message after the result": Case(calls("look"), [result(1), MORE]),
    "a message after text": Case({"role": "assistant", "content": TEXT}, [MORE]),
    "text after a result": Case({"role": "assistant", "content": TEXT}, [MORE], [USER, calls("look"), result(1)]),
}  # fmt: skip

NO_PARALLEL_CALLS = {"mistral_common/v2", "mistral_common/v2_spm"}
"""They refuse two results in a row, so that no rollout with two calls could go on."""

FROM_THE_TEXT = {
    (title, f"trl/{name}")
    for title in ("a message after text", "text after a result")
    for name in ("gptoss", "gptoss_training")
}
"""They end a turn of text otherwise once others follow it: the conversation goes on from its text, as a branch of its own."""


@dataclass(frozen=True)
class Expected:
    """What the template makes of a case."""

    prompt: str
    completion: str
    end: str
    """The token that ends the completion, where the template has one there."""
    rest: str


def expected(theirs: Any, ends: Sequence[str], case: Case) -> Expected | None:
    """Returns what transformers makes of it; None if the template refuses the conversation."""

    def rendered(*messages: Message) -> str:
        text: str = theirs.apply_chat_template(
            list(messages), tools=TOOLS, tokenize=False, add_generation_prompt=messages[-1]["role"] != "assistant"
        )
        return text

    prompt, said, before = rendered(*case.before), case.said, ""
    made = said.get("tool_calls", [])
    try:
        whole = rendered(*case.before, said, *case.following)
        moved = made and said["content"] and whole.find(TEXT) > whole.find(str(case.following[0]["content"]))
    except Exception:  # noqa: BLE001 - a template may refuse in any way
        moved = True
    if moved:  # text beside calls that the template refuses, or writes after the result: the turn keeps it where it was
        before, said = said["content"], said | {"content": ""}
        try:
            whole = rendered(*case.before, said, *case.following)
        except Exception:  # noqa: BLE001
            return None
    begin = alike(prompt, whole)  # less than all of it where the template lets the assistant write otherwise
    marks = [each["function"]["name"] for each in made] or [said["content"]]
    place = max(begin, *(whole.find(mark, begin) for mark in marks))
    found = [(at, token) for token in ends if (at := whole.find(token, place)) >= 0]
    end, token = min(found, default=(place + len(marks[0]), ends[0]))
    return Expected(prompt, before + whole[begin:end], token, whole[end + len(token) :])


def turn_of(chat: Chat, found: Expected, *, ended: bool) -> Turn:
    completion = found.completion + (found.end if ended else "")
    return make_turn(chat.encode(found.prompt), chat.encode(completion), finish_reason="stop" if ended else "length")


@dataclass
class Playing(OnePolicy):
    """A model that says one thing, and then that it is done."""

    chat: Chat
    said: dict[str, Any]
    turn: Turn
    prompts: list[list[int]]
    sampling = SamplingConfig()

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        self.prompts.append(list(prompt_ids))
        return self.turn if len(self.prompts) == 1 else make_turn(prompt_ids, [])

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        if len(self.prompts) > 1:
            return Reply("done")
        made = [ToolCall(each["id"], **each["function"]) for each in self.said["tool_calls"]]
        return Reply(self.said["content"], calls=tuple(made))


def function(tool: Tool, content: str) -> ToolFunction:
    async def call(arguments: dict[str, Any], state: dict[str, Any]) -> str:
        return content

    return ToolFunction(tool, call)


async def played(chat: Chat, case: Case, turn: Turn) -> list[int]:
    """Returns the prompt after a turn as an environment with tools makes it."""
    model = Playing(chat, case.said, turn, [])
    contents = {message["name"]: message["content"] for message in case.following}
    tools = [function(tool, contents.get(tool["function"]["name"], "")) for tool in TOOLS]
    await play_with_tools(model, list(case.before), tools, {})
    return model.prompts[1]


def continued(chat: Chat, case: Case, turn: Turn) -> list[int]:
    """Returns the prompt after a turn as a client of the gateway gets it."""
    conversations = Histories(chat)
    conversations.remember(case.before, TOOLS, case.said, turn)
    return list(conversations.prompt([*case.before, case.said, *case.following], TOOLS))


def usable(chat: Chat) -> bool:
    """Whether an environment with tools starts with the model."""
    with suppress(ValueError):
        chat.check(calls=True)
        return True
    return False


READS_TOOLS = [name for name, text in TEMPLATES.items() if "tools" in text]


@pytest.mark.parametrize("own_tokens", [True, False], ids=["with its tokens", "with bytes alone"])
@pytest.mark.parametrize("name", READS_TOOLS)
async def test_what_follows_a_turn_is_what_the_template_writes(name: str, own_tokens: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    chat = Chat(model_directory(tmp_path, name, own_tokens=own_tokens))
    theirs, ends = AutoTokenizer.from_pretrained(tmp_path), ends_of(name)
    assert usable(chat) == (name not in NO_PARALLEL_CALLS)
    for title, case in CASES.items() if usable(chat) else ():
        found = expected(theirs, ends, case)
        for ended in (True, False) if own_tokens else (False,):
            where = f"{title}, ended: {ended}"
            if found is None:  # the template has no form for several calls at once; their results reach the model
                turn = make_turn(chat.start(case.before, TOOLS), chat.encode("calls"))
                text = chat.transcribe([continued(chat, case, turn)[len(turn.prompt_ids) :]])[0]
                places = [text.find(str(message["content"])) for message in case.following]
                assert [*places] == sorted(places) and places[0] >= 0, where  # noqa: PT018
                continue
            turn = turn_of(chat, found, ended=ended)
            follows = chat.encode(found.prompt + found.completion + found.end + found.rest)
            prompt = continued(chat, case, turn)
            if (title, name) in FROM_THE_TEXT:
                follows = chat.start([*case.before, case.said, *case.following], TOOLS)
            assert chat.transcribe([prompt]) == chat.transcribe([follows]), where
            assert prompt == follows, where
            made = [call["id"] for call in case.said.get("tool_calls", ())]
            if len(case.before) == 1 and made == [
                each.get("name") and each.get("tool_call_id") for each in case.following
            ]:
                assert await played(chat, case, turn) == prompt, where


@pytest.mark.parametrize("name", ["trl/gemma4", "trl/gptoss", "trl/llama3_1", "trl/qwen3"])
def test_a_call_that_another_token_ended_is_answered(name: str, tmp_path: Path) -> None:
    chat = Chat(model_directory(tmp_path, name, own_tokens=True))
    ends = set(chat.stop_token_ids)
    case = CASES["one call"]
    for last in ends:
        turn = make_turn(chat.start(case.before, TOOLS), [*chat.encode("calls"), last])
        prompt = list(chat.extend(turn, case.following, TOOLS, case.said["tool_calls"]))
        assert prompt[: len(turn.prompt_ids) + 6] == [*turn.prompt_ids, *turn.completion_ids]
        written = chat.transcribe([prompt[len(turn.prompt_ids) + 6 :]])[0]
        assert "seen 1" in written
        if name == "trl/gemma4":  # its end of a call opens the result, too
            opened = chat.transcribe([[last]])[0] == "<|tool_response>"
            assert written.startswith("response:look{" if opened else "<|tool_response>response:look{")


@pytest.mark.parametrize("name", ["trl/gemma4", "trl/gptoss"])
async def test_a_result_without_its_call_is_refused(name: str, tmp_path: Path) -> None:
    """By an environment that does not say what the turn called, and by a client of the gateway."""
    chat = Chat(model_directory(tmp_path, name, own_tokens=True))
    turn = make_turn(chat.start([USER], TOOLS), chat.encode("calls"))
    said = {"role": "assistant", "content": "calls"}
    conversations = Histories(chat)
    conversations.remember([USER], TOOLS, said, turn)
    wrong = r"drops the text of role tool of messages\[{}\]|there was no previous assistant message with a tool call"
    with pytest.raises(ValueError, match=wrong.format(0)):
        chat.extend(turn, [result(1)], TOOLS)
    with pytest.raises(ValueError, match=wrong.format(2)):
        conversations.prompt([USER, said, result(1)], TOOLS)


async def test_an_environment_goes_on_from_the_text_where_a_turn_cannot_be_continued(tmp_path: Path) -> None:
    chat = Chat(model_directory(tmp_path, "trl/gptoss", own_tokens=True))
    turn = make_turn(chat.start([USER], TOOLS), [*chat.encode("calls nobody"), *chat.encode("<|return|>")])

    class Malformed(Playing):
        async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
            return Reply("done") if len(self.prompts) > 1 else Reply("", malformed="It is no JSON.")

    model = Malformed(chat, {}, turn, [])
    await play_with_tools(model, [USER], [function(tool, "") for tool in TOOLS], {})
    told = {"role": "user", "content": "No tool was called. It is no JSON."}
    assert model.prompts[1] == chat.start([USER, {"role": "assistant", "content": "calls nobody"}, told], TOOLS)


@pytest.mark.parametrize("name", ["smolvlm", "smolvlm_training", "idefics3", "idefics3_training"])
def test_a_template_that_drops_content_that_is_text_is_refused_by_all(name: str, tmp_path: Path) -> None:
    chat = Chat(model_directory(tmp_path, f"trl/{name}"))
    answered: list[Message] = [USER, {"role": "assistant", "content": TEXT}]
    refused = pytest.raises(ValueError, match=r"drops the text of role user of messages\[0\]")
    with refused:
        chat.check()
    with refused:
        chat.start([USER])
    with pytest.raises(ValueError, match="drops what the assistant said"):
        chat.extend(make_turn([1], [2]), [USER])
    with refused:
        Histories(chat).prompt([USER], ())
    with refused:
        demonstrations_of(chat, answered)
    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in answered]
    assert "go" in chat.transcribe([chat.start(parts)])[0], "an environment may give the parts that it reads"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_instruct_2507"])
def test_a_template_that_drops_content_that_is_parts_is_refused(name: str, tmp_path: Path) -> None:
    chat = Chat(model_directory(tmp_path, f"trl/{name}", own_tokens=True))
    parts = [{"type": "text", "text": "seen 1"}]
    with pytest.raises(ValueError, match=r"drops a part of the text of role user of messages\[0\]"):
        chat.start([{"role": "user", "content": parts}])
    turn = make_turn(chat.start([USER], TOOLS), chat.encode("calls"))
    with pytest.raises(ValueError, match=r"drops a part of the text of role tool of messages\[0\]"):
        chat.extend(turn, [{**result(1), "content": parts}], TOOLS, calls("look")["tool_calls"])


@pytest.mark.parametrize("name", ["mistral_common/v1", "trl/cohere2", "trl/deepseek_r1_distill", "trl/deepseekv3"])
def test_a_message_that_the_template_writes_before_what_was_said_begins_another_branch(
    name: str, tmp_path: Path
) -> None:
    """They write what a system says at the start, which a conversation that goes on token for token has behind it."""
    chat = Chat(model_directory(tmp_path, name, own_tokens=True))
    said, told = {"role": "assistant", "content": TEXT}, {"role": "system", "content": "be brief"}
    turn = make_turn(chat.start([USER]), chat.encode(TEXT))
    with pytest.raises(ValueError, match=r"drops the text of role system of messages\[0\]"):
        chat.extend(turn, [told, MORE])
    conversations = Histories(chat)
    conversations.remember([USER], (), said, turn)
    assert list(conversations.prompt([USER, said, told, MORE], ())) == chat.start([USER, said, told, MORE])
    assert "be brief" in chat.transcribe([conversations.prompt([USER, said, told, MORE], ())])[0]


@pytest.mark.parametrize(
    ("name", "said", "dropped"),
    [
        ("trl/llama3_1", calls("look", content=TEXT), "the text of role assistant"),
        ("trl/gptoss", calls("look", "add"), "a call"),
        ("trl/lfm2", calls("look"), "a call"),
    ],
)
def test_an_answer_that_the_template_does_not_write_is_not_trained(
    name: str, said: dict[str, Any], dropped: str, tmp_path: Path
) -> None:
    chat = Chat(model_directory(tmp_path, name, own_tokens=True))
    with pytest.raises(ValueError, match=rf"drops {dropped} of messages\[1\]"):
        demonstrations_of(chat, [USER, said], TOOLS)
