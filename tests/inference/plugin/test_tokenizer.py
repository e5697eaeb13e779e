"""Our servers read tokens as we do, by tokenizer.json, whatever class a model's files name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from counterpoint.environments.chat import Chat
from counterpoint.inference.plugin.tokenizer import FileTokenizer, read_by_file

pytestmark = pytest.mark.slow

TEXTS = ("The answer is 42 .", " u2 u3\n", "<tool_call>\n{}</tool_call>", "grün , 中", "<s>a</s>", "do n't")


def _classes_built_anew() -> list[str]:
    """Those of transformers' map that have an `__init__` of their own (`TokenizersBackend.convert_to_native_format`)."""
    from transformers import TokenizersBackend
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    found = set()
    for name in set(TOKENIZER_MAPPING_NAMES.values()) - {None, "Pop2PianoTokenizer"}:  # it needs what reads notes
        made = tokenizer_class_from_name(name)
        if made is None or made is TokenizersBackend or not issubclass(made, TokenizersBackend):
            continue
        if "__init__" in vars(made):
            found.add(made.__name__)
    return sorted(found)


def _byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", *letters, "Ġu", "Ġ2", "Ġa"]
    made = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[("Ġ", "u"), ("Ġ", "a")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _word_pieces() -> Tokenizer:
    letters = sorted({letter for text in TEXTS for letter in text if letter != " "})
    words = ["<unk>", "<s>", "</s>", *letters, *("##" + letter for letter in letters), "The", "n", "'", "t"]
    vocabulary = {word: at for at, word in enumerate(dict.fromkeys(words))}
    made = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    return made


def parts_of(tokenizer: Tokenizer) -> dict[str, object]:
    """All but what is put around a text, of which transformers writes an empty one for none."""
    return {name: part for name, part in json.loads(tokenizer.to_str()).items() if name != "post_processor"}


@pytest.mark.parametrize("make", [_byte_level, _word_pieces])
def test_every_class_that_is_built_anew_is_read_by_the_file(
    make: Callable[[], Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.tokenizers import get_tokenizer
    from vllm.tokenizers.registry import TokenizerRegistry

    classes = _classes_built_anew()
    assert {"LlamaTokenizer", "Qwen2Tokenizer", "GemmaTokenizer"} <= set(classes)
    monkeypatch.setattr(TokenizerRegistry, "tokenizers", dict(TokenizerRegistry.tokenizers))
    made = make()
    made.add_special_tokens([AddedToken(each, special=True) for each in ("<unk>", "<s>", "</s>")])
    made.add_tokens([AddedToken(each, normalized=False) for each in ("<tool_call>", "</tool_call>")])

    def directory(name: str) -> Path:
        place = tmp_path / name
        place.mkdir()
        made.save(str(place / "tokenizer.json"))
        (place / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
        settings = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>"}
        (place / "tokenizer_config.json").write_text(json.dumps(settings | {"clean_up_tokenization_spaces": True}))
        (place / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        return place

    places = {name: directory(name) for each in classes for name in (each, f"{each}Fast")}
    some = places["LlamaTokenizerFast"]
    everything = list(range(made.get_vocab_size()))
    if make is _byte_level:  # what it is about
        assert get_tokenizer(some).decode(everything) != Chat(some).transcribe([everything])[0]
    read_by_file()
    for name, place in places.items():
        chat, theirs = Chat(place), get_tokenizer(place)
        assert theirs.decode(everything, skip_special_tokens=False) == chat.transcribe([everything])[0], name
        assert theirs.decode(everything, skip_special_tokens=True) == chat.decode(everything), name
        assert parts_of(theirs._tokenizer) == parts_of(made), name  # stop strings are looked for in its texts
        for text in TEXTS:
            ids = chat.encode(text)
            assert theirs.encode(text, add_special_tokens=False) == ids, (name, text)
            assert theirs.decode(ids) == chat.transcribe([ids])[0], (name, text)


def test_a_directory_without_the_file_is_read_as_by_vllm(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        FileTokenizer.from_pretrained(tmp_path)
