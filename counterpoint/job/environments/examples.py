"""Reads the examples of an environment, before any is played, so that a bad row of its data is named at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from numbers import Integral

from counterpoint.environments.base import Environment, Example
from counterpoint.environments.describe_error import describe_error

READ_SECONDS = 20.0
"""Examples are read for so long; the others are left to training, where a bad one fails its own rollouts."""

MOST = 20_000
"""The most examples that are read. Of more, the first half of this number are read, and as many that are spread evenly over the
others."""


def fault_of_examples(environment: Environment, seconds: float = READ_SECONDS) -> str | None:
    """Returns what is wrong with the first example that is, and what was expected; None if none is, of those that were read."""
    until, size = time.monotonic() + seconds, len(environment)
    for index in _sample(size):
        if time.monotonic() > until:
            return None
        try:
            example = environment.example(index)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            return f"example {index} of {size} cannot be made: {describe_error(error)}"
        if (wrong := _wrong(example)) is not None:
            return f"example {index} of {size}: {wrong}"
    return None


def _sample(size: int) -> Iterator[int]:
    """Yields the indexes that are read, in order."""
    if size <= MOST:
        yield from range(size)
        return
    half = MOST // 2
    yield from range(half)
    yield from (half + position * (size - 1 - half) // (half - 1) for position in range(half))


def _wrong(example: object) -> str | None:
    if not isinstance(example, Example):
        return f"it is {type(example).__name__}; expected an Example"
    if not isinstance(example.index, Integral):
        return f"its index is {str(example.index)[:80]!r}; expected a whole number"
    for name, value in (("prompt", example.prompt), ("answer", example.answer)):
        if not isinstance(value, str):
            return f"its {name} is {type(value).__name__} ({str(value)[:80]!r}); expected text"
    return None
