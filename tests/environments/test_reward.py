"""Rewards by player, with names that every record can hold, and by turn, whose sum is the total."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from counterpoint.environments.reward import (
    MOST_PLAYERS,
    NoReward,
    Reward,
    Rewards,
    TurnRewards,
    as_bounds,
    as_rewards,
    check_bounds,
    number_in,
    own_bounds,
)
from counterpoint.environments.scripted import play
from counterpoint.environments.tasks.guess_number import GuessNumber
from counterpoint.transport.records import Rollout
from tests.support.rollouts import make_rollout, make_turn

NO_TURNS = Rollout("0-0", 0, "sums", 0)


def test_the_reward_of_a_rollout_is_the_mean_of_its_players() -> None:
    assert as_rewards({"white": 1, "black": 0.0, "": True}, play, NO_TURNS) == Rewards(
        2 / 3, {"white": 1.0, "black": 0.0, "": 1.0}
    )
    assert as_rewards({f"p{index}": 1 for index in range(MOST_PLAYERS)}, play, NO_TURNS)[0] == 1.0


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
        as_rewards(rewards, play, NO_TURNS)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("reward", [-0.5, 1.5, {"white": 0.5, "black": 1.5}])
def test_a_reward_outside_its_bounds_names_the_environment(reward: Any) -> None:
    with pytest.raises(ValueError, match=r"environment 'sums': .*reward_bounds are \[0, 1\]"):
        check_bounds(as_rewards(reward, play, NO_TURNS), (0.0, 1.0), "sums")


def test_a_sum_of_weights_may_be_off_by_its_rounding() -> None:
    total = as_rewards(0.1 + 0.2 + 0.7, play, NO_TURNS)
    assert check_bounds(as_rewards(1 + 2e-16, play, NO_TURNS), (0.0, 1.0), "sums")
    assert check_bounds(total, (0.0, 1.0), "sums") == total
    assert check_bounds(as_rewards(7.0, play, NO_TURNS), None, "sums") == Rewards(7.0, {})


def of_turns(*players: str, given: dict[int, float] | None = None) -> Rollout:
    """A rollout with one turn a player, to some of which the loop gave rewards."""
    turns = [replace(make_turn([1], [2]), player=player) for player in players]
    rewards = TurnRewards(turns)
    for index, reward in (given or {}).items():
        rewards.give(reward, index)
    return make_rollout(turns=turns, turn_rewards=rewards.array())


@pytest.mark.parametrize(
    ("value", "rollout", "reward", "by_player", "turns"),
    [
        (Reward(turns=[0.5, 0.25]), of_turns("", ""), 0.75, {}, [0.5, 0.25]),
        (Reward(0.75, [0.5, 0.25]), of_turns("", ""), 0.75, {}, [0.5, 0.25]),
        (Reward(turns=(True, np.float64(0.25))), of_turns("", ""), 1.25, {}, [1.0, 0.25]),
        (Reward(2.0), of_turns("", ""), 2.0, {}, None),
        (Reward(), of_turns("", "", given={1: -1.0}), -1.0, {}, [0.0, -1.0]),
        (-1.0, of_turns("", "", given={1: -1.0}), -1.0, {}, [0.0, -1.0]),
        (Reward(turns=np.array([0.5, -1.0])), of_turns("", "", given={1: -1.0}), -0.5, {}, [0.5, -1.0]),
        (Reward(), of_turns("a", "b", "a", given={0: 1.0, 2: 2.0}), 1.5, {"a": 3.0, "b": 0.0}, [1.0, 0.0, 2.0]),
        ({"a": 3, "b": 0}, of_turns("a", "b", "a", given={0: 1.0, 2: 2.0}), 1.5, {"a": 3.0, "b": 0.0}, [1.0, 0.0, 2.0]),
        (3.0, of_turns("a", "b", "a", given={0: 1.0, 2: 2.0}), 3.0, {}, [1.0, 0.0, 2.0]),
        (Reward({"a": 1.0, "idle": 5.0}, [1.0]), of_turns("a"), 3.0, {"a": 1.0, "idle": 5.0}, [1.0]),
    ],
)
def test_rewards_of_turns_and_their_total(
    value: Any, rollout: Rollout, reward: float, by_player: dict[str, float], turns: list[float] | None
) -> None:
    found = as_rewards(value, play, rollout)
    assert (found.reward, found.by_player) == (reward, by_player)
    assert (None if found.turns is None else found.turns.tolist()) == turns


@pytest.mark.parametrize(
    ("value", "rollout", "complaint"),
    [
        (0.5, of_turns("", given={0: 1.0}), r"returned 0\.5, and the rewards of the turns add up to 1\.0"),
        (Reward(2.0, [0.5, 0.25]), of_turns("", ""), r"returned 2\.0, and the rewards of the turns add up to 0\.75"),
        (
            Reward({"a": 1.0, "b": 1.0}, [1.0, 0.5]),
            of_turns("a", "b"),
            r"returned 1\.0 for player 'b', .* add up to 0\.5",
        ),
        (Reward(turns=[0.5]), of_turns("", ""), "returned 1 rewards for 2 turns; expected a list with one for each"),
        (Reward(turns=cast(Any, 0.5)), of_turns("", ""), r"returned 0\.5 for 2 turns; expected a list"),
        (
            Reward(turns=[0.5, float("nan")]),
            of_turns("", ""),
            r"returned nan \(float\) for turn 1; expected a finite number",
        ),
        (
            Reward(turns=[0.5, cast(Any, None)]),
            of_turns("", ""),
            r"returned None \(NoneType\) for turn 1; expected a number",
        ),
        (Reward(turns=[0.5, 1e39]), of_turns("", ""), r"returned 1e\+39 for turn 1; expected at most 3\.4e\+38"),
        (Reward(turns=[0.5, 2.0]), of_turns("", "", given={1: 1.0}), r"returned 2\.0 for turn 1; .* gave it 1 before"),
        (Reward(), of_turns(""), "no turn got a reward"),
        (Reward(cast(Any, "1")), of_turns(""), r"returned '1' \(str\); expected a number"),
        (None, of_turns("", given={0: 1.0}), "may lack a `return`"),
    ],
)
def test_rewards_of_turns_that_do_not_fit_name_the_score(value: Any, rollout: Rollout, complaint: str) -> None:
    with pytest.raises(NoReward, match=complaint) as refused:
        as_rewards(value, play, rollout)
    assert "(in play, " in str(refused.value)
    assert "scripted.py" in str(refused.value)


@pytest.mark.parametrize("value", [Reward(), Reward(turns=[1.0] * (MOST_PLAYERS + 1))])
def test_turns_of_too_many_players_have_no_reward_for_each(value: Reward) -> None:
    names = [f"p{index}" for index in range(MOST_PLAYERS + 1)]
    with pytest.raises(ValueError, match="rewards for 65 players; expected at most 64"):
        as_rewards(value, play, of_turns(*names, given={0: 1.0}))
    allowed = as_rewards(Reward(), play, of_turns(*names[1:], given={0: 1.0}))
    assert (allowed.reward, len(allowed.by_player)) == (1 / 64, 64)
    assert as_rewards(1.0, play, of_turns(*names, given={0: 1.0})).by_player == {}, "one reward counts for all"


def test_the_sum_of_many_turns_may_be_off_by_the_rounding_of_float32() -> None:
    tenths = of_turns(*[""] * 200, given=dict.fromkeys(range(200), 0.1))
    rewards = as_rewards(20.0, play, tenths)
    assert check_bounds(rewards, (0.0, 20.0), "sums").reward == 20.0
    assert check_bounds(as_rewards(Reward(), play, tenths), (0.0, 20.0), "sums").reward == pytest.approx(20.0, rel=1e-7)


@pytest.mark.parametrize("turns", [[0.5, 1.5], [-0.5, 1.0], [1.0, 1.0]])
def test_bounds_hold_for_each_turn_and_for_the_total(turns: list[float]) -> None:
    with pytest.raises(
        ValueError, match=r"environment 'sums': the reward( of turn [01])? is .* reward_bounds are \[0, 1\]"
    ):
        check_bounds(as_rewards(Reward(turns=turns), play, of_turns("", "")), (0.0, 1.0), "sums")


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
