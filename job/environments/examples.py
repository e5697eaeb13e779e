"""Reads every example of an environment, before any is played, so that a bad row of its data is named at once."""

from __future__ import annotations

import time

from environments.base import Environment, Example
from environments.describe_error import describe_error

READ_SECONDS = 20.0
"""Examples are read for so long; the others are left to training, where a bad one fails its own rollouts."""


def fault_of_examples(environment: Environment, seconds: float = READ_SECONDS) -> str | None:
    """Returns what is wrong with the first example that is, and what was expected; None if none is, of those that were read."""
    until, size = time.monotonic() + seconds, len(environment)
    for index in range(size):
        if time.monotonic() > until:
            return None
        try:
            example = environment.example(index)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            return f"example {index} of {size} cannot be made: {describe_error(error)}"
        if (wrong := _wrong(example, index)) is not None:
            return f"example {index} of {size}: {wrong}"
    return None


def _wrong(example: object, index: int) -> str | None:
    if not isinstance(example, Example):
        return f"it is {type(example).__name__}; expected an Example"
    if type(example.index) is not int or example.index != index:
        return f"its index is {example.index!r}; expected {index}"
    for name, value in (("prompt", example.prompt), ("answer", example.answer)):
        if not isinstance(value, str):
            return f"its {name} is {type(value).__name__} ({str(value)[:80]!r}); expected text"
    return None
