"""Rewards by player: names that every record can hold, and not more than that."""

from __future__ import annotations

from typing import Any

import pytest

from environments.reward import MOST_PLAYERS, as_rewards


def test_the_reward_of_a_rollout_is_the_mean_of_its_players() -> None:
    assert as_rewards({"white": 1, "black": 0.0, "": True}) == (2 / 3, {"white": 1.0, "black": 0.0, "": 1.0})
    assert as_rewards({f"p{index}": 1 for index in range(MOST_PLAYERS)})[0] == 1.0


@pytest.mark.parametrize(
    ("rewards", "complaint"),
    [
        ({f"p{index}": 1.0 for index in range(MOST_PLAYERS + 1)}, "rewards for 65 players; expected at most 64"),
        ({"x" * 2_000_000: 1.0}, "expected a name of up to 64"),
        ({"a b": 1.0}, "'a b'; expected a name"),
        ({"white\n": 1.0}, "expected a name"),
        ({}, "are empty"),
    ],
)
def test_other_names_and_more_of_them_are_refused_in_a_line(rewards: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        as_rewards(rewards)
    assert len(str(refused.value)) < 300
