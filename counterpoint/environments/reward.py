"""What counts as a reward: a number, or one for each player."""

from __future__ import annotations

import inspect
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from counterpoint.transport.config import IDENTIFIER_PATTERN

if TYPE_CHECKING:
    from counterpoint.environments.base import Environment

MOST_PLAYERS = 64
"""The players of one rollout. Their names are in every record of it."""

Rewards = tuple[float, dict[str, float]]
"""The reward of the rollout, and of each player where players have rewards of their own."""

RewardBounds = tuple[float, float]
"""The least and the greatest reward that an environment can give."""

_SCORING = frozenset({"score", "score_group", "reward"})
"""The methods of an environment that decide about its rewards."""

_ROUNDING = 1e-9
"""How far a sum of weighted parts may be outside its bounds, as a share of the larger one's size."""


class NoReward(TypeError):
    """What scores returned no reward. The text names what scores, with its file and line."""


_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def number_in(text: str) -> float | None:
    """Returns the number that a text is, without white space around it; None if it is none, or not finite.

    A program or a model wrote the text. Digits are those of ASCII, without separators, unlike in Python's `float`.
    """
    text = text.strip()
    number = float(text) if _NUMBER.fullmatch(text) else math.inf
    return number if math.isfinite(number) else None


def as_bounds(value: object) -> RewardBounds:
    """Converts what an environment or its configuration has as `reward_bounds`. Raises `ValueError` for anything else."""
    match value:
        case [int() | float() as least, int() | float() as greatest]:
            with suppress(OverflowError):  # an integer of over 308 digits
                if float(least) < float(greatest) and math.isfinite(float(greatest) - float(least)):
                    return float(least), float(greatest)
    raise ValueError(
        f"reward_bounds = {reprlib.repr(value)}; expected two finite numbers, the least reward and a greater one"
    )


def own_bounds(environment: object) -> RewardBounds | None:
    """Returns the `reward_bounds` of an environment, if it has any. A class that scores in its own way does not inherit them.

    Raises `ValueError` for what are no bounds.
    """
    value = getattr(environment, "reward_bounds", None)
    if value is None:
        return None
    if "reward_bounds" not in getattr(environment, "__dict__", ()):
        for each in type(environment).__mro__:
            if "reward_bounds" in vars(each):
                break
            if not _SCORING.isdisjoint(vars(each)):
                return None
    return as_bounds(value)


def check_bounds(rewards: Rewards, bounds: RewardBounds | None, environment: str) -> Rewards:
    """Returns `rewards`. Raises `ValueError`, which names the environment, if one of them is outside its `reward_bounds`.

    A reward that is not finite is not for here: whoever takes it says so.
    """
    if bounds is None:
        return rewards
    least, greatest = bounds
    slack = _ROUNDING * max(abs(least), abs(greatest))
    reward, by_player = rewards
    for each in by_player.values() or (reward,):
        if math.isfinite(each) and not least - slack <= each <= greatest + slack:
            raise ValueError(
                f"environment {environment!r}: the reward is {each!r}, and its reward_bounds are [{least:g}, {greatest:g}]. "
                "Correct what scores, or declare the bounds that it keeps"
            )
    return rewards


def as_rewards(value: object, score: Callable[..., Any]) -> Rewards:
    """Converts what `score` returned: one number, or one for each player by name, whose mean is the rollout's.

    The name of turns that are of no player is empty. Raises `NoReward` for a reward that is no finite number, `ValueError` for
    other names than a player may have, none of them or more than `MOST_PLAYERS`.
    """
    if not isinstance(value, Mapping):
        return _as_reward(value, score), {}
    if len(value) > MOST_PLAYERS:
        raise ValueError(f"there are rewards for {len(value)} players; expected at most {MOST_PLAYERS}")
    for player in value:
        if player != "" and re.fullmatch(IDENTIFIER_PATTERN, str(player)) is None:
            raise ValueError(
                f"there is a reward for the player {reprlib.repr(player)}; expected a name of up to 64 letters, digits, '_', "
                "'.' and '-', which begins with a letter or digit"
            )
    rewards = {str(player): _as_reward(reward, score, f" for player {player!r}") for player, reward in value.items()}
    if not rewards:
        raise ValueError("the rewards by player are empty; expected one for each player, or a number")
    return sum(rewards.values()) / len(rewards), rewards


def as_group_rewards(values: object, rollouts: Sequence[object], environment: Environment) -> list[Rewards]:
    """Does as `as_rewards` with what `score_group` returned for `rollouts`. Raises `ValueError` for another number of rewards."""
    score = environment.score_group
    if inspect.isawaitable(values) or not isinstance(values, Iterable):
        raise NoReward(_no_reward(values, score, "a list of numbers"))
    rewards = [as_rewards(value, score) for value in values]
    if len(rewards) != len(rollouts):
        raise ValueError(f"score_group returned {len(rewards)} rewards for {len(rollouts)} rollouts")
    return rewards


def _as_reward(value: object, score: Callable[..., Any], whose: str = "") -> float:
    """Converts a finite number of Python or numpy; a truth value counts as 1 or 0. Raises `NoReward` for anything else.

    A number as text is refused, too: a parser's output that reaches the score is an error in the environment.
    """
    if not isinstance(value, Real | np.bool_):
        raise NoReward(_no_reward(value, score, "a number", whose))
    with suppress(OverflowError):  # an integer of over 308 digits
        if math.isfinite(reward := float(value)):
            return reward
    raise NoReward(_no_reward(value, score, "a finite number", whose))


def _no_reward(value: object, score: Callable[..., Any], expected: str, whose: str = "") -> str:
    name = getattr(score, "__name__", "score")
    if inspect.iscoroutine(value):
        value.close()
        said = f"{name} returned a coroutine{whose}; expected {expected}: `await` is missing before the call of {place_of(value)}"
    else:
        said = f"{name} returned {reprlib.repr(value)} ({type(value).__name__}){whose}; expected {expected}"
        said += ": one of its branches may lack a `return`" if value is None else ""
    return f"{said} (in {place_of(score)})"


def place_of(function: object) -> str:
    """Returns a function's or a coroutine's name with its file and line, as text for a person."""
    inner: Any = inspect.unwrap(function) if callable(function) else function
    code = getattr(inner, "__code__", None) or getattr(inner, "cr_code", None)
    name = str(getattr(inner, "__name__", inner))
    return name if code is None else f"{name}, {code.co_filename}:{code.co_firstlineno}"
