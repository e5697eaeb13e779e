"""Reads the score out of a judge's answer: exactly one rating on the scale. Whatever else it says is an error, never a score."""

from __future__ import annotations

import json
import math
import re
from reprlib import repr as short_repr
from typing import Any, NoReturn

from counterpoint.environments.reward import number_in
from counterpoint.environments.rewards.judge.config import JudgeConfig
from counterpoint.environments.rewards.processes import BoundedProcesses, OverLimit
from counterpoint.environments.rewards.reasoning import after_reasoning
from counterpoint.environments.rewards.verifiable import seconds_for
from counterpoint.transport.printable import printable

_CPU_SECONDS = 2.0
_BEYOND = 80
"""Characters beside a number in which another one may belong to it."""

_WORDS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_GAP = r"(?:[^\S\n]|[*_`\"'$()\[\]{}\\])*"
_NUMBER = rf"(?:[0-9][0-9.,]*|(?:a\s+)?hundred\b|(?:{'|'.join(_WORDS)})\b)"
_TO = r"(?:[-\u2010-\u2015~]|to\b)"
_OUT_OF = re.compile(
    rf"(?:{_GAP}(?:points?|pts\.?|stars?|marks?|[\u2605\u2b50]+))?{_GAP},?{_GAP}"
    rf"(?:(?:[/\\\u00f7\u2044\u2215\uff0f]|(?:out\s+)?of\b|outta\b|over\b|from\b|in\b)\s*(?:a\s+|the\s+)?"
    rf"(?:possible\s+|(?:max(?:imum)?|total)\s+(?:of\s+)?)?"
    rf"|(?:on|in)\s+(?:a|the)\s+scale\s+(?:of|from)?\s*(?:{_NUMBER}{_GAP}{_TO}{_GAP})?|on\s+an?\s+(?={_NUMBER}-point)"
    rf"|\(\s*(?:max(?:imum)?)\W{{1,3}}|(?:(?:on\s+an?|range|scale|of|from)\W{{0,3}})*{_NUMBER}{_GAP}{_TO}(?=\s*{_NUMBER}(?:\s*[)\]]|\s+scale))"
    rf"|(?:(?:with|where)\s+)?(?={_NUMBER}\s+(?:is|being)\b)){_GAP}({_NUMBER})",
    re.IGNORECASE,
)
"""What names the scale of the number before it, as in `8/10`, `8 out of 10`."""
_LINKS = (
    r"(?:(?:up\s+)?to|or|and|maybe|perhaps|possibly|probably|not|but|rather|than|instead|of|through|vs|versus|"
    r"(?:could|might)\s+be)\b\.?"
)
_ANOTHER = (
    rf"(?:[-\u2010-\u2015~/:,;&|\u30fb\uff0d]|\.\.+|\u2026|\xb1|\+/?-|\\pm|{_LINKS})(?:{_GAP}{_LINKS})*{_GAP}"
    r"[-+~<>\u2248]?"
)
_NEXT = re.compile(
    rf"{_GAP}{_ANOTHER}{_NUMBER}|\s+[0-9]|{_GAP}(?:[-=]>|[\u2190-\u21ff]|(?:and\s+)?(?:a\s+|one\s+)?half\b)|\+(?!\w)|-ish\b",
    re.IGNORECASE,
)
_LAST = re.compile(rf"[0-9][0-9.,]*(?:{_GAP}{_ANOTHER})?\Z|(?:[.~\u2248]|(?<!\w)[<>])\Z", re.IGNORECASE)
"""Another number that belongs to the one behind, as in `7-8`, or its own beginning."""
_PERCENT = re.compile(rf"{_GAP}(?:%|percent\b)", re.IGNORECASE)
_WHOLE = re.compile(r"[-+]?[0-9][\w.,]*(?:(?<=[eE])[-+][0-9]+)?")


class NoScore(ValueError):
    """An answer without a valid score; the message is for a person."""


async def score_of(answer: str, config: JudgeConfig, processes: BoundedProcesses) -> float:
    """Returns the score as a value from 0 to 1. What stands in reasoning does not count. Raises `NoScore`."""
    text = after_reasoning(answer)
    try:
        if config.score_key is not None:
            score = _at_key(text, config.score_key)
        else:
            score = _number(text, *await _match(text, config.score_pattern, processes), config)
    except NoScore as error:
        raise error if text == answer else NoScore(f"{error} (without its reasoning)") from None
    if not math.isfinite(score) or not config.least <= score <= config.most:
        raise NoScore(f"the score {score:g} is out of range; expected {config.least:g} to {config.most:g}")
    return (score - config.least) / (config.most - config.least)


async def _match(text: str, pattern: str, processes: BoundedProcesses) -> tuple[int, int]:
    """Returns where the score begins and ends."""
    arguments = {"pattern": pattern, "text": text}
    try:
        answer = await processes.run("search", arguments, cpu_seconds=_CPU_SECONDS, seconds=seconds_for(_CPU_SECONDS))
    except OverLimit as error:
        raise NoScore(f"score_pattern takes too long on an answer of {len(text)} characters: {error}") from error
    if answer["match"] is None:
        raise NoScore(f"score_pattern finds nothing in an answer that ends with {_end(text)}")
    start, end = answer["span"]
    return start, end


def _number(text: str, start: int, end: int, config: JudgeConfig) -> float:
    """Returns the number at a place of the text, if it is a whole one, of this scale, and the only one there."""
    found = text[start:end]
    start += len(found) - len(found.lstrip())
    whole = _WHOLE.match(text, start)
    number = None if whole is None else number_in(whole[0].rstrip(".,_"))
    if whole is None or number is None:
        raise NoScore(f"score_pattern finds {short_repr(found)}, which is no number")
    after = start + len(whole[0].rstrip(".,_"))
    most = after + _BEYOND
    percent = _PERCENT.match(text, after, most)
    scale = _OUT_OF.match(text, after, most)
    behind = after if scale is None else scale.end(1)
    said = text[max(0, start - _BEYOND) : start].rpartition("\n")[2]
    if (
        (scale is not None and _size(scale[1]) != config.most)
        or (percent is not None and (config.least, config.most) != (0, 100))
        or _NEXT.match(text, behind, most)
        or _LAST.search(said)
        or end < after
    ):
        line = text[start : start + _BEYOND].partition("\n")[0]
        raise NoScore(
            f"score_pattern finds {short_repr(found)} in {printable(said[-20:] + line)!r}; expected one number from "
            f"{config.least:g} to {config.most:g}, alone or out of {config.most:g}"
        )
    if text[behind:end].strip(" \t\n*_`\"'.,"):
        raise NoScore(f"score_pattern finds {short_repr(found)}, which is no number")
    return number


def _size(number: str) -> float | None:
    name = number.lower()
    return (
        100.0 if name.endswith("hundred") else float(_WORDS[name]) if name in _WORDS else number_in(name.rstrip(".,"))
    )


def _at_key(text: str, key: str) -> float:
    """Returns the number at `key` of the JSON object between the text's first and last brace."""
    start, end = text.find("{"), text.rfind("}")
    try:
        value = (
            json.loads(
                text[start : end + 1],
                object_pairs_hook=_with_names_once,
                parse_int=float,
                parse_constant=_refuse_constant,
            )
            if 0 <= start < end
            else None
        )
    except (ValueError, RecursionError) as error:
        if isinstance(error, NoScore):
            raise
        value = None
    if not isinstance(value, dict):
        raise NoScore(f"there is no JSON object in an answer that ends with {_end(text)}")
    score = value.get(key)
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise NoScore(f"{key!r} is {short_repr(score)}; expected a number")
    return float(score)


def _with_names_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise NoScore(f"the JSON object has a key twice among {short_repr([name for name, _ in pairs])}")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _end(text: str) -> str:
    return repr(printable(text[-120:]))
