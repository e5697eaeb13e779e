"""Pieces have the ids of the whole text, by the tokenizer's own word, or the tokenizer is known to need the whole."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Split, Whitespace
from tokenizers.pre_tokenizers import Sequence as Both

from counterpoint.environments.text_pieces import PATTERNS, may_be_cut, pieces_of

BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
GPT_2 = ByteLevel(add_prefix_space=False, use_regex=True)
DIVIDED: dict[str, Any] = {
    "GPT-2": GPT_2,
    "SmolLM2": Both([Digits(individual_digits=True), GPT_2]),
    **{f"pattern {i}": Both([Split(Regex(each), "isolated"), BYTES]) for i, each in enumerate(sorted(PATTERNS))},
}
SAMPLES = [
    "it's a'll we'd  go\n\n to  the\tend, 12 345.\r\n",
    "Die WELT is' ABc éa á 漢字 x/ y\n/z <e> a<e> b",
    "a b c d e f g",
]
TEXTS = st.text(st.sampled_from(" \n\t\rabdlsABé漢́ 1.,/'<e>"), max_size=60) | st.text(max_size=60)


@cache
def tokenizer_of(name: str, composed: bool) -> Tokenizer:
    """A tokenizer that has merged whatever is twice in its samples, with tokens that take the white space around them."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = DIVIDED[name]
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=800, min_frequency=1, show_progress=False, initial_alphabet=ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(SAMPLES * 2, trainer)
    tokenizer.add_tokens(
        [AddedToken("<e>", lstrip=True, rstrip=True), AddedToken("  "), AddedToken("bd", single_word=True)]
    )
    return tokenizer


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("name", DIVIDED)
@given(text=TEXTS, least=st.integers(1, 20))
@example(text="".join(SAMPLES), least=1)
def test_pieces_have_the_ids_of_the_whole(name: str, composed: bool, text: str, least: int) -> None:
    tokenizer = tokenizer_of(name, composed)
    assert may_be_cut(tokenizer)
    pieces = list(pieces_of(text, least))
    assert "".join(pieces) == text
    ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids]
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_text_is_cut_into_pieces_of_about_the_size_and_never_within_what_has_no_place_for_it() -> None:
    pieces = list(pieces_of("ab " * 10_000, 100))
    assert {len(piece) for piece in pieces[1:-1]} == {102}
    long = "x" * 200_000
    assert list(pieces_of(f"{long} y", 10)) == [long, " y"]
    assert list(pieces_of("", 10)) == [""]


def whole(**parts: Any) -> Tokenizer:
    """A tokenizer that divides as GPT-2's does, but for `parts`."""
    tokenizer = Tokenizer(parts.get("model") or BPE())
    tokenizer.pre_tokenizer = parts.get("pre", GPT_2)
    if "normalizer" in parts:
        tokenizer.normalizer = parts["normalizer"]
    tokenizer.add_tokens(parts.get("added", []))
    return tokenizer


@pytest.mark.parametrize(
    "parts",
    [
        {"pre": BYTES},
        {"pre": None},
        {"pre": Metaspace()},
        {"pre": Whitespace()},
        {"pre": ByteLevel(add_prefix_space=True)},
        {"pre": Both([Split(Regex(r"\w+ \w+"), "isolated"), GPT_2])},
        {"pre": Both([Split(Regex(min(PATTERNS)), "merged_with_next"), BYTES])},
        {"pre": pre_tokenizers.Sequence([])},
        {"pre": Both([BYTES, Split(Regex(min(PATTERNS)), "isolated")])},
        {"normalizer": normalizers.Prepend("_")},
        {"normalizer": normalizers.Replace("a b", "c")},
        {"model": BPE(dropout=0.5)},
        {"model": WordLevel({"a": 0}, unk_token="a")},
        {"added": [AddedToken("hello world")]},
        {"added": [AddedToken("word", rstrip=True)]},
        {"added": [AddedToken(" word", single_word=True)]},
    ],
)
def test_any_other_tokenizer_needs_the_whole(parts: dict[str, Any]) -> None:
    assert may_be_cut(whole())
    assert not may_be_cut(whole(**parts))
