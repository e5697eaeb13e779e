"""Attempts made by hand, and reward functions as an operator writes them."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from counterpoint.environments.base import Example
from counterpoint.environments.rewards.rubric import Rubric, Scored

STARTED: list[str] = []
CANCELLED: list[str] = []


async def score(rubric: Rubric, completion: str, answer: str = "", **info: Any) -> Scored:
    return await rubric.score(Example(0, "?", answer, info), completion, {"completion": completion})


def length(example: Example, completion: str, state: dict[str, Any]) -> float:
    return len(completion) / 10


async def parts(example: Example, completion: str, state: dict[str, Any]) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"short": float(len(completion) < 5), "same": float(completion == example.answer)}


def garbage(example: Example, completion: str, state: dict[str, Any]) -> Any:
    return {
        "nan": float("nan"), "text": "0.7", "none": None, "nothing": {}, "many": dict.fromkeys(map(str, range(99)), 1.0),
        "name": {"a/../b": 1.0}, "number as name": {1: 1.0}, "inf": {"a": float("inf")}, "list": [1.0],
    }[completion]  # fmt: skip


def raises(example: Example, completion: str, state: dict[str, Any]) -> float:
    raise {"exit": SystemExit(3), "interrupt": KeyboardInterrupt(), "error": ZeroDivisionError("no")}[completion]


async def raises_later(example: Example, completion: str, state: dict[str, Any]) -> float:
    return raises(example, completion, state)


async def waits(example: Example, completion: str, state: dict[str, Any]) -> float:
    STARTED.append(completion)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        CANCELLED.append(completion)
        raise
    return 0.0


def no_reward(one: int) -> float:
    return 0.0


def hidden_alarm(example: Example, completion: str, state: dict[str, Any]) -> float:
    try:
        library = importlib.import_module("signal")
        library.signal(14, library.SIG_DFL)
    except ValueError:
        return 0.0
    return 1.0


NOT_A_FUNCTION = 5
