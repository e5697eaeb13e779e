"""Reads the score out of a judge's answer: exactly one rating on the scale. Whatever else it says is an error, never a score."""

from __future__ import annotations

import json
import math
from reprlib import repr as short_repr
from typing import Any, NoReturn

from counterpoint.environments.rewards.judge.config import JudgeConfig
from counterpoint.environments.rewards.judge.only_number import NoScore, number_at
from counterpoint.environments.rewards.judge.rating import FoundRating, rating_in
from counterpoint.environments.rewards.processes import BoundedProcesses, OverLimit
from counterpoint.environments.rewards.reasoning import after_reasoning
from counterpoint.environments.rewards.verifiable import seconds_for
from counterpoint.transport.printable import printable

_CPU_SECONDS = 2.0


async def score_of(answer: str, config: JudgeConfig, processes: BoundedProcesses) -> float:
    """Returns the score as a value from 0 to 1. What stands in reasoning does not count. Raises `NoScore`."""
    text = after_reasoning(answer)
    try:
        if config.score_key is not None:
            score = _at_key(text, config.score_key)
        else:
            score = number_at(text, await _found(text, config, processes), config)
    except NoScore as error:
        raise error if text == answer else NoScore(f"{error} (without its reasoning)") from None
    if not math.isfinite(score) or not config.least <= score <= config.most:
        raise NoScore(f"the score {score:g} is out of range; expected {config.least:g} to {config.most:g}")
    return (score - config.least) / (config.most - config.least)


async def _found(text: str, config: JudgeConfig, processes: BoundedProcesses) -> FoundRating:
    """Returns where the score begins and ends."""
    if config.score_pattern is None:
        found = rating_in(text)
        if isinstance(found, str):
            raise NoScore(f"there is no rating, since {found}, in an answer that ends with {_end(text)}")
        return found
    arguments = {"pattern": config.score_pattern, "text": text}
    try:
        answer = await processes.run("search", arguments, cpu_seconds=_CPU_SECONDS, seconds=seconds_for(_CPU_SECONDS))
    except OverLimit as error:
        raise NoScore(f"score_pattern takes too long on an answer of {len(text)} characters: {error}") from error
    if answer["match"] is None:
        raise NoScore(f"score_pattern finds nothing in an answer that ends with {_end(text)}")
    start, end = answer["span"]
    return FoundRating(0, start, end)


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
