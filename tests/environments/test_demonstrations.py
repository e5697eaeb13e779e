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
