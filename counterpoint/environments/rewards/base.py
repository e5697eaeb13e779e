"""What a reward function is: an attempt in, a value out. `rubric.py` weighs several; the other files here are the kinds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from reprlib import repr as short_repr
from typing import Any, Protocol

import numpy as np

from counterpoint.environments.base import EnvironmentContext, Example
from counterpoint.environments.reward import NoReward

MAX_PARTS = 32
"""Most parts that a function may return, and that a rubric may have."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,30}")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt, which is scored."""

    example: Example
    completion: str
    """What the model wrote, as text."""
    state: dict[str, Any]
    """The state of the rollout."""


@dataclass(frozen=True, slots=True)
class Value:
    """What a reward function gives an attempt."""

    value: float
    """The reward, a finite number."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the rollout, named below the part."""


class RewardFunction(Protocol):
    """A kind of reward. One instance serves all rollouts of an environment."""

    @property
    def columns(self) -> frozenset[str]:
        """The columns of a row that it reads by their names in the configuration."""

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The least and the greatest value that it can give; None if that is not certain."""

    async def start(self, context: EnvironmentContext) -> None:
        """Prepares what the first `score` needs. It may not be called; `score` then does without."""

    async def score(self, attempt: Attempt) -> Value:
        """Returns the value of an attempt. Raises rather than guesses one: the rollout then fails and says why."""

    async def close(self) -> None:
        """Frees what it holds."""


def as_value(returned: object, where: str) -> Value:
    """Converts what a user's function returned: a finite number, or a mapping of names to such, whose sum is the value.

    Raises `NoReward`, or `ValueError` for names, which begin with `where`.
    """
    if not isinstance(returned, Mapping):
        return Value(_as_number(returned, where))
    if not 1 <= len(returned) <= MAX_PARTS:
        raise ValueError(f"{where} returned {len(returned)} parts; expected 1 to {MAX_PARTS}")
    parts = {}
    for name, value in returned.items():
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ValueError(
                f"{where} returned a part named {short_repr(name)}; expected letters, digits, _ . - (31 at most)"
            )
        parts[name] = _as_number(value, f"{where}, part {name!r},")
    return Value(math.fsum(parts.values()), parts)


def _as_number(value: object, where: str) -> float:
    if not isinstance(value, Real | np.bool_):
        raise NoReward(f"{where} returned {short_repr(value)} ({type(value).__name__}); expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise NoReward(f"{where} returned {number}; expected a finite number")
    return number
