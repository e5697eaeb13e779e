"""What counts as a reward: a number, or one for each player."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from numbers import Real

import numpy as np

from transport.config import IDENTIFIER_PATTERN

MOST_PLAYERS = 64
"""The players of one rollout. Their names are in every record of it."""

Rewards = tuple[float, dict[str, float]]
"""The reward of the rollout, and of each player where players have rewards of their own."""


def as_rewards(value: object) -> Rewards:
    """Converts what `score` returned: one number, or one for each player by name, whose mean is the rollout's.

    The name of turns that are of no player is empty. Raises `TypeError` for a reward that is no number, `ValueError` for other
    names than a player may have, none of them or more than `MOST_PLAYERS`.
    """
    if not isinstance(value, Mapping):
        return _as_reward(value), {}
    if len(value) > MOST_PLAYERS:
        raise ValueError(f"there are rewards for {len(value)} players; expected at most {MOST_PLAYERS}")
    for player in value:
        if player != "" and re.fullmatch(IDENTIFIER_PATTERN, str(player)) is None:
            raise ValueError(
                f"there is a reward for the player {reprlib.repr(player)}; expected a name of up to 64 letters, digits, '_', "
                "'.' and '-', which begins with a letter or digit"
            )
    rewards = {str(player): _as_reward(reward) for player, reward in value.items()}
    if not rewards:
        raise ValueError("the rewards by player are empty; expected one for each player, or a number")
    return sum(rewards.values()) / len(rewards), rewards


def _as_reward(value: object) -> float:
    """Converts a number of Python or numpy; a truth value counts as 1 or 0. Raises `TypeError` for anything else.

    A number as text is refused, too: a parser's output that reaches the score is an error in the environment.
    """
    if isinstance(value, Real | np.bool_):
        return float(value)
    raise TypeError(f"the reward is {reprlib.repr(value)} ({type(value).__name__}); expected a number")
