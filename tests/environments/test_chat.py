"""Chat: prompts as the template says, continuations token for token, and messages for people when a model cannot do it."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from counterpoint.environments import chat as chat_module
from counterpoint.environments.chat import LONG_TEXT, Chat, Message
from tests.support.polling import wait_until
from tests.support.rollouts import make_turn

USER = [{"role": "user", "content": "hello"}]
REPLY = [{"role": "user", "content": "more"}]

# As many models have it: a mark for each role's start, a line feed after each end, thoughts cut from what was said before.
LINED_TEMPLATE = """\
{%- for message in messages %}
    {%- generation %}
    {{- '<|' + message.role + '|>\\n' + message.content.split('</think>')[-1].strip() + eos_token + '\\n' }}
    {%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""


@pytest.fixture
def directory(tokenizer_directory: Path, tmp_path: Path) -> Path:
    """A model directory of one's own to spoil."""
    return Path(shutil.copytree(tokenizer_directory, tmp_path / "model"))


def test_a_conversation_starts_as_the_template_says(chat: Chat) -> None:
    expected = chat.encode("<|user|>hello<|end|><|assistant|>")
    assert chat.start(USER) == expected
    assert len(expected) == len("hello") + 3


def test_a_group_renders_its_opening_once_and_each_rollout_has_its_own_ids(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[object] = []
    render = Chat.render

    def counting(self: Chat, messages: Sequence[Message], *rest: Any, **named: Any) -> str:
        rendered.append(messages)
        return render(self, messages, *rest, **named)

    monkeypatch.setattr(Chat, "render", counting)
    chat.start(REPLY)
    rendered.clear()
    messages = [dict(message) for message in USER]
    starts = [chat.start(messages) for _ in range(8)]
    assert len(rendered) == 1
    starts[0].clear()
    assert starts[1] == chat.start(USER) != []
    messages[0]["content"] = "good bye"
    assert chat.start(messages) != starts[1]


def test_threads_that_start_equal_long_conversations_have_it_encoded_once_and_others_one_after_another(
    tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, encode, encoding = Chat(tokenizer_directory), Chat.encode, Lock()
    encoded: list[str] = []

    def alone(self: Chat, text: str) -> list[int]:
        assert encoding.acquire(blocking=False), "another long text is being encoded"
        encoded.append(text)
        time.sleep(0.01)  # the others come
        ids = encode(self, text)
        encoding.release()
        return ids

    monkeypatch.setattr(Chat, "encode", alone)
    contents = [letter * (LONG_TEXT + 1) for letter in "aaaabc"]
    messages = [[{"role": "user", "content": content}] for content in contents]
    with ThreadPoolExecutor(len(contents)) as threads:
        equal = list(threads.map(chat.start_packed, messages[:4]))
        assert len(encoded) == 1
        others = list(threads.map(chat.encode_packed, contents)) + list(threads.map(chat.start_packed, messages[4:]))
    monkeypatch.undo()
    expected = [chat.encode(f"<|user|>{content}<|end|><|assistant|>") for content in contents]
    assert [ids.tolist() for ids in equal + others[-2:]] == expected
    assert [ids.tolist() for ids in others[:-2]] == [chat.encode(content) for content in contents]
    assert len(set(map(id, equal))) == 4, "each has its own"
    assert equal[0].itemsize == 4


def test_an_event_loop_never_waits_for_the_long_texts_of_threads(
    tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, encode, begun, goes_on = Chat(tokenizer_directory), Chat.encode, Event(), Event()

    def slowly(self: Chat, text: str) -> list[int]:
        if text.startswith("a"):
            begun.set()
            assert goes_on.wait(60)
        return encode(self, text)

    async def start() -> list[int]:
        return chat.start([{"role": "user", "content": "b" * (LONG_TEXT + 1)}])

    monkeypatch.setattr(Chat, "encode", slowly)
    with ThreadPoolExecutor(2) as threads:
        try:
            threads.submit(chat.encode_packed, "a" * (LONG_TEXT + 1))
            assert begun.wait(60)
            assert threads.submit(asyncio.run, start()).result(30)
        finally:
            goes_on.set()


def test_a_long_text_is_encoded_in_pieces_where_the_tokenizer_allows_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, whole = "some words of it, " * LONG_TEXT, Chat(directory)
    described = json.loads((directory / "tokenizer.json").read_text())
    described["pre_tokenizer"]["use_regex"] = True
    (directory / "tokenizer.json").write_text(json.dumps(described))
    divided, encode, encoded = Chat(directory), Chat.encode, dict[Chat, list[str]]()

    def noted(self: Chat, piece: str) -> list[int]:
        encoded.setdefault(self, []).append(piece)
        return encode(self, piece)

    monkeypatch.setattr(Chat, "encode", noted)
    assert divided.encode_packed(text) == whole.encode_packed(text)
    assert encoded[whole] == [text]
    assert max(map(len, encoded[divided])) < LONG_TEXT + 10
    assert "".join(encoded[divided]) == text


def test_lengths_that_a_trainer_left_in_the_tokenizer_have_no_effect(directory: Path) -> None:
    expected = Chat(directory).start(USER)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for length in (4, 64):
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=length)
        tokenizer.save(str(directory / "tokenizer.json"))
        chat = Chat(directory)
        assert chat.start(USER) == expected
        assert chat.encode("a" * LONG_TEXT + "b") == [*chat.encode("a") * LONG_TEXT, *chat.encode("b")]


def test_a_template_has_the_variables_that_transformers_gives_to_each(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(
        "{{ bos_token }}{% if tools is not none or documents is not none %}given: {{ tools }}{% endif %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": None}))
    (directory / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|user|>"}, "eos_token": "other"}')
    chat = Chat(directory)
    assert chat.start(USER) == chat.encode("<|user|>hello")
    assert chat.stop_token_ids == tuple(chat.encode("<|end|>")), "the newer file's"
    assert chat.start(USER, [{"type": "function"}])[:7] == chat.encode("<|user|>given:")


def test_a_template_that_reads_the_clock_is_rendered_each_time(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ strftime_now('%f') }}" + LINED_TEMPLATE)
    chat = Chat(directory)
    first = chat.start(USER)
    wait_until(lambda: chat.start(USER) != first, "another rendering")


def test_an_opening_that_json_cannot_hold_is_rendered_each_time(chat: Chat) -> None:
    messages = [{"role": "user", "content": "hello", "of": {1, 2}}]
    assert chat.start(messages) == chat.start(messages) == chat.start(USER)


def test_the_end_of_turn_is_the_stop_token(chat: Chat) -> None:
    assert list(chat.stop_token_ids) == chat.encode("<|end|>")


def test_decoding_leaves_special_tokens_out_and_keeps_every_text(chat: Chat) -> None:
    text = "naïve ☂ text \n  with spaces"
    assert chat.decode([*chat.encode(text), *chat.stop_token_ids]) == text


def test_a_completion_that_ended_itself_is_not_ended_twice(chat: Chat) -> None:
    prompt = chat.start(USER)
    completion = [*chat.encode("hi"), *chat.stop_token_ids]
    extended = list(chat.extend(make_turn(prompt, completion), REPLY))
    assert extended == chat.encode("<|user|>hello<|end|><|assistant|>hi<|end|><|user|>more<|end|><|assistant|>")


def test_a_completion_cut_by_its_length_is_ended(chat: Chat) -> None:
    extended = list(chat.extend(make_turn(chat.start(USER), chat.encode("hi"), finish_reason="length"), REPLY))
    assert extended == chat.encode("<|user|>hello<|end|><|assistant|>hi<|end|><|user|>more<|end|><|assistant|>")


def test_an_empty_completion_is_ended(chat: Chat) -> None:
    extended = list(chat.extend(make_turn(chat.start(USER), [], finish_reason="length"), REPLY))
    assert extended == chat.encode("<|user|>hello<|end|><|assistant|><|end|><|user|>more<|end|><|assistant|>")


@given(data=st.data())
def test_every_prompt_extends_the_last_token_for_token(chat: Chat, data: st.DataObject) -> None:
    """Whatever tokens the model writes, text or not: nothing of them is tokenized again."""
    prompt = chat.start(USER)
    for _ in range(data.draw(st.integers(1, 4))):
        written = data.draw(st.lists(st.integers(0, 255), max_size=8))
        ended = data.draw(st.booleans())
        turn = make_turn(
            prompt, [*written, *chat.stop_token_ids] if ended else written, finish_reason="stop" if ended else "length"
        )
        reply = data.draw(st.text(alphabet="ab <|>\n☂", max_size=5))
        prompt = list(chat.extend(turn, [{"role": "user", "content": reply}]))
        before = [*turn.prompt_ids.tolist(), *written, *chat.stop_token_ids]
        assert prompt == before + chat.encode(f"<|user|>{reply}<|end|><|assistant|>")


def test_a_template_that_ends_turns_with_a_line_feed_gets_it_back(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(LINED_TEMPLATE)
    chat = Chat(directory)
    prompt = chat.start(USER)
    completion = [*chat.encode("<think>hm</think>hi"), *chat.stop_token_ids]
    extended = list(chat.extend(make_turn(prompt, completion), REPLY))
    assert extended == prompt + completion + chat.encode("\n<|user|>\nmore<|end|>\n<|assistant|>\n")


def test_a_turn_that_the_next_ones_first_token_ended_is_followed_by_the_rest(directory: Path) -> None:
    """As GLM's, whose turns have no token for their end: the model writes the one of the next role."""
    (directory / "chat_template.jinja").write_text(
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    user = Chat(directory).encode("<|user|>")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": user}))
    chat = Chat(directory)
    prompt, text = chat.start(USER), chat.encode("hi")
    expected = chat.start([*USER, {"role": "assistant", "content": "hi"}, *REPLY])
    assert list(chat.extend(make_turn(prompt, [*text, *user]), REPLY)) == expected
    assert list(chat.extend(make_turn(prompt, text, finish_reason="length"), REPLY)) == expected
    other = [*prompt, *text, *chat.encode("<|end|>")]
    assert list(chat.extend(make_turn(prompt, other[len(prompt) :]), REPLY)) == other + expected[len(other) - 1 :]


def test_the_template_may_stand_in_the_tokenizer_config(directory: Path) -> None:
    template = directory / "chat_template.jinja"
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["chat_template"] = [
        {"name": "tools", "template": "-"},
        {"name": "default", "template": template.read_text()},
    ]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    template.unlink()
    assert Chat(directory).start(USER) == Chat(directory).encode("<|user|>hello<|end|><|assistant|>")


ADDED = {
    "261": {"__type": "AddedToken", "content": "<think>", "special": False, "normalized": False, "lstrip": True},
    "262": {"content": "<|tool|>", "special": True, "normalized": False},
}


def with_added_tokens(directory: Path, added: object) -> Path:
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "added_tokens_decoder": added}))
    return directory


def test_tokens_that_only_the_tokenizer_config_adds_are_not_split(directory: Path) -> None:
    chat = Chat(with_added_tokens(directory, ADDED))
    assert chat.encode("a <think><|tool|>") == [*chat.encode("a"), 261, 262]
    assert chat.decode([261, 262]) == "<think>"
    assert chat.vocabulary == 263


def test_a_token_that_would_get_another_id_than_its_own_is_refused(directory: Path) -> None:
    with_added_tokens(directory, {"300": {"content": "<think>"}})
    with pytest.raises(ValueError, match=r"gives '<think>' the id 300; with tokenizer.json it is 261"):
        Chat(directory)


@pytest.mark.parametrize("added", [{"x": {"content": "a"}}, {"261": {"contents": "a"}}, {"261": "a"}, [1]])
def test_malformed_added_tokens_are_named(directory: Path, added: object) -> None:
    with_added_tokens(directory, added)
    with pytest.raises(ValueError, match="added_tokens_decoder is malformed"):
        Chat(directory)


TOOL_TEMPLATE = """\
{{- '<|system|>' + tools | tojson + '<|end|>' }}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]


def test_conversations_with_tools_have_the_template_for_them(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_TEMPLATE)
    chat = Chat(directory)
    assert chat.start(USER) == chat.encode("hello<|end|>")
    opening = chat.start(USER, TOOLS)
    assert opening[-7:] == chat.encode("hello<|end|><|assistant|>")
    turn = make_turn(opening, chat.encode("hi"))
    extended = list(chat.extend(turn, REPLY, TOOLS))
    assert extended == [*opening, *chat.encode("hi<|end|><|user|>more<|end|><|assistant|>")]


def test_templates_of_which_none_is_the_default_are_named(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_TEMPLATE)
    with pytest.raises(ValueError, match="there are tool_use, and none is named 'default'"):
        Chat(directory)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["files", "list", "dictionary"])
def test_tokens_and_templates_are_those_of_transformers(directory: Path, place: str) -> None:
    from transformers import AutoTokenizer

    with_added_tokens(directory, {**ADDED, "258": {"content": "<|user|>", "special": True, "rstrip": True}})
    if place == "files":
        (directory / "chat_template.jinja").write_text(LINED_TEMPLATE)
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_TEMPLATE)
    else:
        (directory / "chat_template.jinja").unlink()
        settings = json.loads((directory / "tokenizer_config.json").read_text())
        templates: Any = {"tool_use": TOOL_TEMPLATE, "default": LINED_TEMPLATE}
        if place == "list":
            templates = [{"name": name, "template": text} for name, text in templates.items()]
        (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": templates}))
    chat, theirs = Chat(directory), AutoTokenizer.from_pretrained(directory)
    for text in ("a <think> b", "<|tool|> c", "<|user|> d <|end|> e", "<|user|>"):
        assert chat.encode(text) == theirs.encode(text, add_special_tokens=False)
    for tools in ((), TOOLS):
        asked = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": True}
        assert chat.render(USER, tools, add_generation_prompt=True) == theirs.apply_chat_template(USER, **asked)


@pytest.mark.parametrize(
    ("reads", "written"),
    [
        ("message.reasoning_content", "why yes"),
        ("message.reasoning", "why yes"),
        ("message['reasoning']", "why yes"),
        ("message.get('reasoning') or message.get('reasoning_content')", "why yes"),
        ("''", " yes"),
    ],
)
def test_reasoning_has_the_name_that_the_template_reads(
    directory: Path, reads: str, written: str, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ " + reads + " }} {{ message.content }}{% endfor %}"
    )
    messages = [{"role": "assistant", "reasoning_content": "why", "content": "yes"}]
    assert Chat(directory).render(messages, add_generation_prompt=False) == written
    assert ("reasoning_content" in caplog.text) == (reads == "''")


AROUND: dict[str, Any] = {
    "nothing": None,
    "bytes": processors.ByteLevel(trim_offsets=False),
    "beginning": processors.TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 258)]),
    "both": processors.TemplateProcessing(
        single="<|user|> $A <|end|>", special_tokens=[("<|user|>", 258), ("<|end|>", 256)]
    ),
    "two": processors.TemplateProcessing(
        single="<|user|> <|user|> $A <|end|>", special_tokens=[("<|user|>", 258), ("<|end|>", 256)]
    ),
    "roberta": processors.RobertaProcessing(("<|end|>", 256), ("<|user|>", 258)),
    "end": processors.TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", 256)]),
}
AROUND["sequence"] = processors.Sequence([AROUND["bytes"], AROUND["beginning"]])


@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("adds", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_a_text_by_itself_has_what_the_tokenizer_puts_around_it(
    directory: Path, around: str, adds: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is encoded in pieces. `add_bos_token` changes nothing in transformers 5."""
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if AROUND[around] is not None:
        tokenizer.post_processor = AROUND[around]
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|user|>", **adds}))
    theirs = AutoTokenizer.from_pretrained(directory)
    for longest in (chat_module.LONG_TEXT, 8):
        monkeypatch.setattr(chat_module, "LONG_TEXT", longest)
        chat = Chat(directory)
        for text in ("1 + 2 = ", "", "a", "<|user|>grün <|end|>", "word " * 20):
            assert chat.encode_text(text).tolist() == theirs(text).input_ids, text


def test_several_stop_tokens_come_from_the_generation_config(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": [256, 260]}')
    chat = Chat(directory)
    assert chat.stop_token_ids == (256, 260)
    prompt = chat.start(USER)
    other_end = [*chat.encode("hi"), 256]
    assert list(chat.extend(make_turn(prompt, other_end), REPLY))[: len(prompt) + 3] == prompt + other_end


def test_a_template_that_refuses_says_so_with_the_roles(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match=r"refuses messages of roles \[user\]: roles must alternate"):
        Chat(directory).start(USER)


def test_a_template_cannot_reach_out_of_its_sandbox(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="fails with SecurityError on messages of roles"):
        Chat(directory).start(USER)


def test_a_template_that_drops_answers_cannot_be_extended(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}<|assistant|>")
    chat = Chat(directory)
    turn = make_turn(chat.start(USER), chat.encode("hi"))
    with pytest.raises(ValueError, match="drops what the assistant said"):
        chat.extend(turn, REPLY)


# What Qwen3's template does with `enable_thinking`: an empty thought opens the answer where it is false.
THINKING_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""


def test_the_template_is_given_further_variables(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    thinking = Chat(directory)
    brief = thinking.with_template_kwargs({"enable_thinking": False})
    prompt = brief.start(USER)
    assert prompt == brief.encode("<|user|>hello<|end|><|assistant|><think></think>")
    completion = [*brief.encode("hi"), *brief.stop_token_ids]
    extended = list(brief.extend(make_turn(prompt, completion), REPLY))
    assert extended == prompt + completion + brief.encode("<|user|>more<|end|><|assistant|><think></think>")
    assert thinking.start(USER) == thinking.encode("<|user|>hello<|end|><|assistant|>")


def test_a_variable_that_the_template_never_reads_is_refused(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    with pytest.raises(ValueError, match=r"'enable_thinkng'; .*'enable_thinking'\? .*add_gen"):
        Chat(directory).with_template_kwargs({"enable_thinkng": False})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda directory: (directory / "tokenizer.json").unlink(), "tokenizer.json does not exist"),
        (lambda directory: (directory / "tokenizer.json").write_text("{"), "tokenizer.json"),
        (lambda directory: (directory / "chat_template.jinja").unlink(), "no chat template"),
        (lambda directory: (directory / "chat_template.jinja").write_text("{% if %}"), "does not compile"),
        (lambda directory: (directory / "tokenizer_config.json").write_text("{"), "is not JSON"),
        (lambda directory: (directory / "tokenizer_config.json").write_text("[]"), "holds list, expected an object"),
        (lambda directory: (directory / "tokenizer_config.json").unlink(), "nothing names the token that ends a turn"),
        (
            lambda directory: (directory / "tokenizer_config.json").write_text('{"eos_token": "<none>"}'),
            "eos_token '<none>' is not in tokenizer.json",
        ),
    ],
)
def test_a_broken_model_directory_is_named(directory: Path, spoil: object, message: str) -> None:
    assert callable(spoil)
    spoil(directory)
    with pytest.raises(ValueError, match=message):
        Chat(directory)
