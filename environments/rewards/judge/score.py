"""Reads the score out of a judge's answer. Whatever is no finite number within the range is an error, never a score."""

from __future__ import annotations

import math
from reprlib import repr as short_repr
from typing import Any

import orjson

from counterpoint.environments.reward import number_in
from counterpoint.environments.rewards.judge.config import JudgeConfig
from counterpoint.environments.rewards.processes import BoundedProcesses, OverLimit
from counterpoint.environments.rewards.verifiable import seconds_for
from counterpoint.transport.printable import printable

_CPU_SECONDS = 2.0


class NoScore(ValueError):
    """An answer without a valid score; the message is for a person."""


async def score_of(text: str, config: JudgeConfig, processes: BoundedProcesses) -> float:
    """Returns the score as a value from 0 to 1. Raises `NoScore`."""
    if config.score_key is not None:
        score = _at_key(text, config.score_key)
    else:
        score = _number(await _match(text, config.score_pattern, processes), text)
    if not math.isfinite(score) or not config.least <= score <= config.most:
        raise NoScore(f"the score {score:g} is out of range; expected {config.least:g} to {config.most:g}")
    return (score - config.least) / (config.most - config.least)


async def _match(text: str, pattern: str, processes: BoundedProcesses) -> object:
    arguments = {"pattern": pattern, "text": text}
    try:
        answer = await processes.run("search", arguments, cpu_seconds=_CPU_SECONDS, seconds=seconds_for(_CPU_SECONDS))
    except OverLimit as error:
        raise NoScore(f"score_pattern takes too long on an answer of {len(text)} characters: {error}") from error
    return answer["match"]


def _number(found: object, text: str) -> float:
    if not isinstance(found, str):
        raise NoScore(f"score_pattern finds nothing in an answer that ends with {_end(text)}")
    number = number_in(found.strip().rstrip(".,_"))
    if number is None:
        raise NoScore(f"score_pattern finds {short_repr(found)}, which is no number")
    return number


def _at_key(text: str, key: str) -> float:
    """Returns the number at `key` of the JSON object between the text's first and last brace."""
    start, end = text.find("{"), text.rfind("}")
    try:
        value: Any = orjson.loads(text[start : end + 1]) if 0 <= start < end else None
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise NoScore(f"there is no JSON object in an answer that ends with {_end(text)}")
    score = value.get(key)
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise NoScore(f"{key!r} is {short_repr(score)}; expected a number")
    return float(score)


def _end(text: str) -> str:
    return repr(printable(text[-120:]))
