"""A reward function as an operator writes it: `path = "examples.rewards.length:words"` in a rubric."""

from __future__ import annotations

from typing import Any

from counterpoint.environments import Example


def words(example: Example, completion: str, state: dict[str, Any]) -> float:
    """Returns the number of words."""
    return float(len(completion.split()))
