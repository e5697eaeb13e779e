"""Rewards by player: names that every record can hold, and not more than that."""

from __future__ import annotations

from typing import Any

import pytest

from counterpoint.environments.reward import (
    MOST_PLAYERS,
    as_bounds,
    as_rewards,
    check_bounds,
    number_in,
    own_bounds,
)
from counterpoint.environments.scripted import play
from counterpoint.environments.tasks.guess_number import GuessNumber


def test_the_reward_of_a_rollout_is_the_mean_of_its_players() -> None:
    assert as_rewards({"white": 1, "black": 0.0, "": True}, play) == (2 / 3, {"white": 1.0, "black": 0.0, "": 1.0})
    assert as_rewards({f"p{index}": 1 for index in range(MOST_PLAYERS)}, play)[0] == 1.0


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
        as_rewards(rewards, play)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("reward", [-0.5, 1.5, {"white": 0.5, "black": 1.5}])
def test_a_reward_outside_its_bounds_names_the_environment(reward: Any) -> None:
    with pytest.raises(ValueError, match=r"environment 'sums': .*reward_bounds are \[0, 1\]"):
        check_bounds(as_rewards(reward, play), (0.0, 1.0), "sums")


def test_a_sum_of_weights_may_be_off_by_its_rounding() -> None:
    total = as_rewards(0.1 + 0.2 + 0.7, play)
    assert check_bounds(as_rewards(1 + 2e-16, play), (0.0, 1.0), "sums")
    assert check_bounds(total, (0.0, 1.0), "sums") == total
    assert check_bounds(as_rewards(7.0, play), None, "sums") == (7.0, {})


@pytest.mark.parametrize(
    "bounds",
    [
        (1.0, 0.0),
        (0.0, 0.0),
        (0.0,),
        (0.0, float("inf")),
        ("0", "1"),
        1.0,
        (float("nan"), 1.0),
        (0, 10**400),
        (-1e308, 1e308),
    ],
)
def test_what_are_no_bounds_is_refused(bounds: Any) -> None:
    with pytest.raises(ValueError, match=r"reward_bounds = .*expected two finite numbers"):
        as_bounds(bounds)


def test_a_class_that_scores_in_its_own_way_has_no_bounds_of_another() -> None:
    class Named(GuessNumber):
        pass

    class Otherwise(GuessNumber):
        async def score(self, example: Any, rollout: Any) -> float:
            return 7.0

    class Declared(Otherwise):
        reward_bounds = (0.0, 7.0)

    assert [own_bounds(each()) for each in (Named, Otherwise, Declared)] == [(0.0, 1.0), None, (0.0, 7.0)]


@pytest.mark.parametrize("text", ["1", "-1", "+0.5", ".5", "5.", " 0.25\n", "1e-3", "2.5E+1", "007"])
def test_a_number_as_text(text: str) -> None:
    assert number_in(text) == float(text)


@pytest.mark.parametrize(
    "text",
    ["", " ", ".", "1_0", "\u0663", "\uff11", "1,5", "1/2", "0x1", "nan", "inf", "-Infinity", "1e999", "1e999999999999", "1 0",
     "1\n0", "--1", "1e", "e1", "True", "50%", "\u22121", "1\u00a00", "9" * 400],
)  # fmt: skip
def test_what_is_no_number_as_text(text: str) -> None:
    assert number_in(text) is None
