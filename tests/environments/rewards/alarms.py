"""A reward function whose source shows that it sets an alarm, as the library's time limits do."""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify

from counterpoint.environments.base import Example


def equal(example: Example, completion: str, state: dict[str, Any]) -> float:
    return float(verify(parse(example.answer), parse(completion)))
