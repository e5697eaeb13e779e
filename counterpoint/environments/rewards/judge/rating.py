"""Finds where a judge's answer says its rating, if the operator gives no pattern: at a label, else in a sentence.

A label is `Score:`, or without one `Rating:`. A sentence is `The score is 8`, in which nothing says that it might be. A number
that is the whole answer is one, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from counterpoint.environments.reward import number_in

NUMBER = r"[-+]?[0-9][\w.,]*(?:(?<=[eE])[-+][0-9]+)?"
"""Whatever begins as a number, so that `1e400` or `0x10` is no score, and not 1 or 0."""

_SCALE = r"[*_`\"']{0,4}\s{0,4}(?:[(\[][^()\[\]\n]{1,40}[)\]]|out\s{1,4}of\s{1,4}\w{1,9}|/\s{0,4}[0-9]{1,9})"
_LABEL = re.compile(
    rf"\b(?P<name>score|rating)\b(?P<scale>{_SCALE})?"
    rf"(?P<marks>(?:\\(?:boxed|[(])|[-=]>|\s[-\u2013\u2014](?=\s)|[\s*_`\"'|>:=\uff1a\uff1d\u2192\[({{<$]){{0,24}})(?P<number>{NUMBER})?",
    re.IGNORECASE,
)
_SIGN = re.compile(r"[:=\uff1a\uff1d]")
_PARTS = re.compile(r"[\n*_|>\u2192\u2013\u2014\[(<]|\s-\s")
"""What parts a label from a number behind it, where no colon does."""
_BEFORE = 48
"""Characters before a label in which stands whose it is."""
_WORD = re.compile(r"([\w'\u2019-]+)([\s*_`\"'\u201c\u2018(\[{|]*)\Z")
_QUOTED = re.compile(r"[\"'`\u201c\u2018]\Z")
_OF_ALL = {
    "the", "my", "your", "this", "final", "overall", "total", "so", "is", "give", "assign", "judge's", "and", "with",
    "or", "but", "then", "now", "no", "hence", "thus", "therefore",
}  # fmt: skip
_OF_THE_SCALE = {"maximum", "max", "minimum", "min", "perfect", "possible", "best", "highest", "lowest", "top", "full"}

_SENTENCE = re.compile(
    rf"(?:(?:\b(?:the|my|its|this|final|overall|total)\s{{1,4}}|^[#*_ \t]{{0,8}})(?:score|rating)\s{{1,4}}is\b"
    rf"|\bI\s{{1,4}}(?:give|assign|award)\b[^.?!\n0-9]{{0,60}}\b(?:score|rating)\s{{1,4}}of)"
    rf"[\s*_`\"'\[(:]{{1,8}}(?P<number>{NUMBER})",
    re.IGNORECASE | re.MULTILINE,
)
_MIGHT = re.compile(
    r"\b(?:if|unless|when|would|could|should|might|may|not|else|otherwise|perfect|(?:max|min)\w*|highest|lowest|possible|best|worst)"
    r"\b|n['\u2019]t\b",
    re.IGNORECASE,
)
_ALONE = re.compile(
    rf"[\s*_`\"'\[(]{{0,8}}(?P<number>{NUMBER})(?:\s{{0,4}}(?:/|out\s+of)\s{{0,4}}\w{{1,9}})?[\s*_`\"'\])]{{0,8}}"
)
"""A rating that is the whole answer."""
_ENDS = re.compile(r"[.!?;](?=\s)|\n")
_LONGEST_SENTENCE = 400


@dataclass(frozen=True, slots=True)
class FoundRating:
    """Where a rating stands in an answer."""

    since: int
    """Where what may belong to it begins."""
    start: int
    end: int
    scale: str = ""
    """What its label says in parentheses."""


def rating_in(text: str) -> FoundRating | str:
    """Returns where an answer's rating stands, or why there is none.

    Of labels that are of the whole the last counts, also where nothing follows it; others have to say the same number.
    """
    labels = [each for each in _LABEL.finditer(text) if _is_label(text, each) and not _is_mention(text, each)]
    for name in ("score", "rating"):
        named = [(each, _whose(text, each)) for each in labels if each["name"].lower() == name]
        of_all = [each for each, whose in named if whose is None]
        of_parts = [each for each, whose in named if whose is not None and whose not in _OF_THE_SCALE]
        if of_all:
            last = of_all[-1]
            line = text.rfind("\n", 0, last.start())
            beside = [each for each in of_all if each.start() > line]
            return _one(beside, f"{name!r} stands there with several numbers in one line")
        if of_parts:
            return _one(of_parts, f"{name!r} stands there of several things, with several numbers")
    said = [each for each in _SENTENCE.finditer(text) if not _MIGHT.search(_sentence(text, each))]
    if not said and (alone := _ALONE.fullmatch(text)) is not None:
        said = [alone]
    return _one(said, "its sentences have several ratings") if said else "it says none"


def _one(found: list[re.Match[str]], several: str) -> FoundRating | str:
    """Returns the last of what was found if all have its number, else `several`."""
    last = found[-1]
    if last["number"] is None:
        return "no number follows its label"
    if len({_value(each["number"]) for each in found}) > 1:
        return several
    start, end = last.span("number")
    if "marks" not in last.groupdict():
        return FoundRating(start, start, end)
    since = last.start("marks")
    is_tag = last.string[: last.start()].endswith("<") and last["marks"].startswith(">")
    return FoundRating(since + is_tag, start, end, last["scale"] or "")


def _value(number: str | None) -> float | str | None:
    return None if number is None else number_in(number.rstrip(".,_")) or number


def _is_label(text: str, found: re.Match[str]) -> bool:
    """Whether a word names what follows: by a colon, or before a number by other marks or as the first of its line."""
    if _SIGN.search(found["marks"]):
        return True
    if found["number"] is None:
        return False
    begins = text[max(0, found.start() - _BEFORE) : found.start()].rpartition("\n")[2]
    return bool(_PARTS.search(found["marks"])) or not begins.strip(" \t*_`#>|([{\"'")


def _whose(text: str, found: re.Match[str]) -> str | None:
    """Returns whose score a label names, None for that of the whole."""
    if found["scale"] and not re.search(r"[0-9]|\bout\b", found["scale"]):
        return found["scale"]
    word = _word_before(text, found)
    whose = "" if word is None else word[1].lower()
    return None if not whose or whose in _OF_ALL or not whose[0].isalpha() else whose


def _is_mention(text: str, found: re.Match[str]) -> bool:
    """Whether a label is in quotation marks behind a word, as in `it claims "Score: 10"`: then it is of another's text."""
    word = _word_before(text, found)
    return word is not None and _QUOTED.search(word[2]) is not None and word[1].lower() not in _OF_ALL


def _word_before(text: str, found: re.Match[str]) -> re.Match[str] | None:
    return _WORD.search(text[max(0, found.start() - _BEFORE) : found.start()].rpartition("\n")[2])


def _sentence(text: str, found: re.Match[str]) -> str:
    """Returns the sentence around what was found."""
    before = text[max(0, found.start() - _LONGEST_SENTENCE) : found.start()]
    *_, start = [0, *(each.end() for each in _ENDS.finditer(before))]
    behind = text[found.end() : found.end() + _LONGEST_SENTENCE]
    end = _ENDS.search(behind)
    return before[start:] + found[0] + behind[: end.start() if end else None]
