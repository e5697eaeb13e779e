"""What is trained of a conversation is what the model would have written: up to the token that ends its turn."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from counterpoint.environments.chat import Chat
from counterpoint.environments.demonstrations import demonstrations_of
from tests.orchestrator.toy_model import make_toy_model

USER, ANSWER = {"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    return Chat(make_toy_model(tmp_path / "model"))


def trained_text(chat: Chat, ids: list[int], trained: list[bool]) -> str:
    return chat.transcribe([[token for token, own in zip(ids, trained, strict=True) if own]])[0]


def test_each_turn_is_trained_up_to_its_end(chat: Chat) -> None:
    messages = [USER, ANSWER, {"role": "user", "content": "and"}, {"role": "assistant", "content": "so on"}, USER]
    (found,) = demonstrations_of(chat, messages)
    text = chat.transcribe([found.token_ids])[0]
    assert text == chat.render(messages[:4], add_generation_prompt=False)
    end = chat.transcribe([[chat.stop_token_ids[0]]])[0]
    assert trained_text(chat, found.token_ids, found.trained) == f"an answer{end}so on{end}"
    assert found.token_ids[: len(chat.start([USER]))] == chat.start([USER])


def test_a_turn_that_is_not_trained_is_read(chat: Chat) -> None:
    messages = [USER, ANSWER, USER, {"role": "assistant", "content": "so on"}]
    (whole,), (found,) = demonstrations_of(chat, messages), demonstrations_of(chat, messages, untrained={1})
    assert found.token_ids == whole.token_ids
    end = chat.transcribe([[chat.stop_token_ids[0]]])[0]
    assert trained_text(chat, found.token_ids, found.trained) == f"so on{end}"


def test_a_conversation_without_an_answer_is_refused(chat: Chat) -> None:
    with pytest.raises(ValueError, match="it has no message of role assistant"):
        demonstrations_of(chat, [USER])


def with_template(directory: Path, template: str) -> Chat:
    (directory / "chat_template.jinja").write_text(template)
    return Chat(directory)


def test_a_template_that_forgets_gives_a_sample_for_each_turn(tmp_path: Path) -> None:
    """As templates do that drop the reasoning of earlier turns."""
    directory = make_toy_model(tmp_path / "model")
    template = (
        "{% for m in messages %}{{ m.role }}\n"
        "{{ m.content if m.role == 'user' or loop.last else m.content[:2] }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    chat = with_template(directory, template)
    first, second = demonstrations_of(chat, [USER, ANSWER, USER, {"role": "assistant", "content": "so on"}])
    assert trained_text(chat, first.token_ids, first.trained) == "an answer</s>"
    assert trained_text(chat, second.token_ids, second.trained) == "so on</s>"
    assert "an answer" not in chat.transcribe([second.token_ids])[0]
    messages = [USER, ANSWER, USER, {"role": "assistant", "content": "so on"}]
    assert demonstrations_of(chat, messages, untrained={1}) == [second], "a sample without a trained token is none"


def test_a_template_that_begins_a_turn_otherwise_is_refused(tmp_path: Path) -> None:
    directory = make_toy_model(tmp_path / "model")
    template = (
        "{% for m in messages %}{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant\nthinking: {% endif %}"
    )
    with pytest.raises(ValueError, match="message 1 of role assistant differently"):
        demonstrations_of(with_template(directory, template), [USER, ANSWER])


def test_a_turn_that_the_next_ones_first_token_ends_is_trained_up_to_that(tmp_path: Path) -> None:
    """As GLM's. Nothing follows the last turn, which has no end then."""
    directory = make_toy_model(tmp_path / "model")
    template = "{% for m in messages %}{{ '</s>' if m.role == 'user' else '<s>' }}{{ m.content }}{% endfor %}"
    chat = with_template(directory, template + "{% if add_generation_prompt %}<s>{% endif %}")
    (found,) = demonstrations_of(chat, [USER, ANSWER, USER, ANSWER])
    assert trained_text(chat, found.token_ids, found.trained) == "an answer</s>an answer"
    assert not found.trained[0], "the first role's token ends nothing"


def test_a_tokenizer_that_begins_every_text_with_a_space_puts_none_before_a_turn(tmp_path: Path) -> None:
    """As Llama 2's. The model writes `▁four` after a prompt, and not `▁`, `▁four`."""
    pieces = ["<unk>", "<s>", "</s>", *"▁two?[/]four", "▁f", "ou", "▁fou", "▁four"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("▁", "f"), ("o", "u"), ("▁f", "ou"), ("▁fou", "r")], unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if message.role == 'user' %}<s>{{ message.content }} [/]"
        "{% else %} {{ message.content }}</s>{% endif %}{% endfor %}"
    )
    chat = Chat(tmp_path)
    turn = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "four"}]
    (found,) = demonstrations_of(chat, [*turn, *turn])
    ids = [vocabulary[piece] for piece in ("▁four", "</s>")]
    prompt = chat.start(turn[:1])
    assert found.token_ids == [*prompt, *ids, *prompt, *ids]
    assert found.trained == [*[False] * len(prompt), True, True] * 2


_END = "</s>\n{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
_ROW = [USER, ANSWER | {"reasoning_content": "since so"}]


@pytest.mark.parametrize(
    ("writes", "answer", "lost"),
    [
        ("{{ '[%s]' % m.reasoning_content if m.reasoning_content }}{{ m.content }}", "reasoning_content", ""),
        # As Kimi K2 Thinking's, which writes reasoning only behind the last answer without calls.
        ("[{{ m.reasoning_content if m.tool_calls }}]{{ m.content }}", "reasoning_content", "reasoning_content"),
        # As DeepSeek V4's, unless a variable is set.
        ("[{{ m.reasoning_content if thinking }}]{{ m.content }}", "reasoning_content", "reasoning_content"),
        ("[{{ m.thinking if thinking }}]{{ m.content }}", "thinking", "thinking"),
        ("[{{ m['plan'] if m.tool_calls }}]{{ m.content }}", "plan", "plan"),
        ("{{ m.content }}", "reasoning_content", "reasoning_content"),
        # As DeepSeek R1's, which cuts it out of the text.
        ("{{ m.content.split('</think>')[-1] }}", "<think>", "content"),
        # As Qwen3's, which writes it with other white space.
        ("{{ m.content.replace('</think>', '\n</think>\n\n') }}", "<think>", ""),
    ],
)
def test_what_a_template_leaves_out_at_a_turns_own_place_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, writes: str, answer: str, lost: str
) -> None:
    chat = with_template(make_toy_model(tmp_path / "model"), "{% for m in messages %}{{ m.role }}\n" + writes + _END)
    said = {"content": "<think>since so</think>so"} if answer == "<think>" else {answer: "since so"}
    for _ in range(2):
        demonstrations_of(chat, [USER, ANSWER | said])
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(found) == bool(lost), "it is said once"
    assert all(f"{lost!r} of a message of role assistant" in line for line in found)


_CALLS = [
    {"type": "function", "function": {"name": "look", "arguments": {"at": "it", "deep": 3}}},
    {"type": "function", "function": {"name": "add", "arguments": {}}},
]


@pytest.mark.parametrize(
    ("writes", "lost"),
    [
        ("[{{ c.function.name }} {{ c.function.arguments | tojson }}]", []),
        (
            "[{{ c.function.name }}{% for k in c.function.arguments %} {{ k }}={{ c.function.arguments[k] }}{% endfor %}]",
            [],
        ),
        # Values without their names.
        ("[{{ c.function.name }}{% for k in c.function.arguments %} {{ c.function.arguments[k] }}{% endfor %}]", []),
        ("[{{ c.function.arguments | tojson }}]", ["tool_calls.function.name"]),
        (
            "[{{ c.function.name }}{% for k, v in c.function.arguments.items() if v is string %} {{ k }}={{ v }}{% endfor %}]",
            ["tool_calls.function.arguments.deep"],
        ),
    ],
)
def test_what_a_template_leaves_out_of_a_call_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, writes: str, lost: list[str]
) -> None:
    each = f"{{% for c in m.tool_calls or [] %}}{writes}{{% endfor %}}"
    template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}" + each + _END
    chat = with_template(make_toy_model(tmp_path / "model"), template)
    demonstrations_of(chat, [USER, {"role": "assistant", "content": "", "tool_calls": _CALLS}])
    assert [name for name in lost if f"{name!r} of a message" in caplog.text] == lost
    assert len(caplog.records) == len(lost)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_name_that_a_template_leaves_out_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, role: str) -> None:
    named = [each | ({"name": "Ann"} if each["role"] == role else {}) for each in (USER, ANSWER)]
    for writes, said in (("{{ m.role }}\n", 1), ("{{ m.role }}\n{{ m.name }}", 0)):
        caplog.clear()
        chat = with_template(
            make_toy_model(tmp_path / role / str(said)), "{% for m in messages %}" + writes + "{{ m.content }}" + _END
        )
        demonstrations_of(chat, named)
        assert len(caplog.records) == said


@pytest.mark.parametrize(
    "writes", ["{{ tools[0] | tojson }}", "{% for t in tools[:1] %}{{ t.function.name }}{% endfor %}"]
)
def test_a_tool_that_a_template_leaves_out_is_refused(tmp_path: Path, writes: str) -> None:
    template = "{% if tools %}" + writes + "{% endif %}{% for m in messages %}{{ m.role }}\n{{ m.content }}" + _END
    chat = with_template(make_toy_model(tmp_path / "model"), template)
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "so")]
    demonstrations_of(chat, [USER, ANSWER], tools[:1])
    with pytest.raises(ValueError, match="drops the tool 'so'"):
        demonstrations_of(chat, [USER, ANSWER], tools)
    with pytest.raises(ValueError, match="drops the tool 'so'"):
        chat.start([USER], tools)


def test_reasoning_of_an_earlier_turn_is_learned_at_its_own_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for m in messages %}{{ m.role }}\n[{{ m.reasoning_content if loop.last }}]{{ m.content }}" + _END
    chat = with_template(make_toy_model(tmp_path / "model"), template.replace("[", "{{ '[' if m.role != 'user' }}"))
    found = demonstrations_of(chat, [*_ROW, *_ROW])
    assert ["since so" in trained_text(chat, each.token_ids, each.trained) for each in found] == [True, True]
    assert not caplog.records


def test_a_chat_with_other_variables_says_what_it_leaves_out_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for m in messages %}{{ m.role }}\n[{{ m.reasoning_content if thinking }}]{{ m.content }}" + _END
    plain = with_template(make_toy_model(tmp_path / "model"), template)
    demonstrations_of(plain.with_template_kwargs({"thinking": True}), _ROW)
    assert not caplog.records
    demonstrations_of(plain.with_template_kwargs({"thinking": False}), _ROW)
    assert len(caplog.records) == 1
