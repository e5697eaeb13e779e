"""Cuts a long text where its tokenizer begins another token in any case, so that it may be encoded piece by piece.

A byte-level tokenizer divides a text by regular expressions, from left to right, and encodes each part by itself. No match of the
expressions below holds an ASCII letter and white space after it, and a match that ends with a letter ends there whatever follows.
So two parts meet between a letter and a space or line feed, and neither depends on the text of the other. Any other tokenizer has
its texts whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson
from tokenizers import Tokenizer
from tokenizers.models import BPE

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OF_CASES = (
    r"[^\r\n\p{L}\p{N}]?%(C)s*%(S)s+%(end)s|[^\r\n\p{L}\p{N}]?%(C)s+%(S)s*%(end)s|%(N)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + _SPACES
)
PATTERNS = frozenset(
    {
        # Llama 3 and GPT-4; Qwen 2 to 3; Qwen 3.5.
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES,
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES,
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES,
        # gpt-oss and GPT-4o; Mistral.
        _OF_CASES % {"C": _CAPITALS, "S": _SMALL, "end": _CONTRACTIONS + "?", "N": r"\p{N}{1,3}"},
        _OF_CASES % {"C": _CAPITALS, "S": _SMALL, "end": "", "N": r"\p{N}"},
    }
)
"""The expressions by which models' tokenizers divide texts. That of GPT-2 is in the tokenizers library."""

_CUT = re.compile(r"[A-Za-z](?=[ \n])")
_WINDOW = 2**16
"""Characters that are searched for a cut in one call, which holds the GIL."""


def may_be_cut(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer gives `pieces_of` any text the ids that it gives the whole, one after the other."""
    normalizer = _state(tokenizer.normalizer)
    if normalizer not in (None, {"type": "NFC"}):  # which composes nothing with a letter before white space
        return False
    if not isinstance(tokenizer.model, BPE) or tokenizer.model.dropout:
        return False
    for token in tokenizer.get_added_tokens_decoder().values():  # found before the text is divided
        if re.search(r"[A-Za-z][ \n]", token.content) or (token.rstrip and token.content[-1:].isalpha()):
            return False
        if token.single_word and token.content[:1].isspace():  # also found where a text begins, but not after a letter
            return False
    outer = _state(tokenizer.pre_tokenizer)
    steps = [] if outer is None else outer.get("pretokenizers", [outer])
    if any(step["type"] == "ByteLevel" for step in steps[:-1]):  # which makes letters of white space
        return False
    return all(map(_is_known, steps)) and any(map(_divides_words, steps))


def pieces_of(text: str, least: int) -> Iterator[str]:
    """Yields the text in pieces of about `least` characters, longer where nothing shows that it may be cut."""
    begin, place = 0, least
    while place < len(text):
        found = _CUT.search(text, place, place + _WINDOW)
        if found is None:
            place += _WINDOW
            continue
        yield text[begin : found.end()]
        begin, place = found.end(), found.end() + least
    yield text[begin:]


def _divides_words(step: dict[str, Any]) -> bool:
    """Whether a step divides a text between a letter and white space."""
    if step["type"] == "ByteLevel":
        return bool(step["use_regex"])
    return step["type"] == "Split" and step["pattern"].get("Regex") in PATTERNS


def _is_known(step: dict[str, Any]) -> bool:
    """Whether a step never looks from a letter across white space."""
    match step["type"]:
        case "ByteLevel":
            return not step["add_prefix_space"]
        case "Digits":
            return True
        case "Split":
            kinds = (("Isolated", False), ("Removed", True))
            return _divides_words(step) and (step["behavior"], step["invert"]) in kinds
        case _:
            return False


def _state(part: Any) -> Any:
    """Returns what `tokenizer.json` says of a part of a tokenizer."""
    return None if part is None else orjson.loads(part.__getstate__())
