"""Rewards that a loop gives to turns: each at most once, finite, and to a turn that is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from counterpoint.environments.reward import TurnRewards
from counterpoint.transport.records import Turn
from tests.support.rollouts import make_turn


def turns_of(*players: str) -> list[Turn]:
    return [replace(make_turn([1], [2]), player=player) for player in players]


def values(rewards: TurnRewards) -> list[float] | None:
    array = rewards.array()
    return None if array is None else array.tolist()


def test_a_reward_is_for_the_last_turn_or_for_the_one_that_is_named() -> None:
    turns = turns_of("")
    rewards = TurnRewards(turns)
    assert values(rewards) is None
    rewards.give(0.5, None)
    turns += turns_of("", "", "")
    rewards.give(np.float64(0.25), 2)
    rewards.give(True, turns[1])
    assert values(rewards) == [0.5, 1.0, 0.25, 0.0]
    rewards.give(-2, np.int64(3))  # type: ignore[arg-type]
    array = rewards.array()
    assert array is not None
    assert array.dtype == np.float32
    assert array.tolist() == [0.5, 1.0, 0.25, -2.0]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0


def test_a_players_reward_is_for_the_last_turn_of_the_player() -> None:
    turns = turns_of("white", "black", "", "black")
    rewards = TurnRewards(turns)
    rewards.give(1.0, None, "white")
    rewards.give(2.0, None, "black")
    rewards.give(3.0, 1, "black")
    rewards.give(4.0, 2)
    assert values(rewards) == [1.0, 3.0, 4.0, 2.0]


@pytest.mark.parametrize(
    ("value", "turn", "player", "complaint"),
    [
        (float("nan"), None, "", r"the reward of turn 1 is nan \(float\); expected a finite number"),
        (float("-inf"), 0, "", "the reward of turn 0 is -inf"),
        (1e39, 0, "", r"the reward of turn 0 is 1e\+39 .* of at most 3\.4e\+38"),
        (10**400, 0, "", "the reward of turn 0 is 1000"),
        ("1", 0, "", r"the reward of turn 0 is '1' \(str\)"),
        (None, 0, "", r"the reward of turn 0 is None"),
        (1.0, 2, "", "a reward for turn 2; the rollout has 2 turns so far, which are numbered from 0"),
        (1.0, -1, "", "a reward for turn -1;"),
        (1.0, True, "", "a reward for turn True;"),
        (1.0, 0.0, "", "a reward for turn 0.0;"),
        (1.0, "0", "", "a reward for turn '0';"),
        (1.0, make_turn([1], [2]), "", "a turn that is not this rollout's"),
        (1.0, 0, "black", "turn 0 is of player 'white', not of 'black'"),
        (1.0, 1, "black", "turn 1 is of no player, not of 'black'"),
        (1.0, None, "black", "a reward before the first turn of player 'black'"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_by_name(value: Any, turn: Any, player: str, complaint: str) -> None:
    rewards = TurnRewards(turns_of("white", ""))
    with pytest.raises(ValueError, match=complaint):
        rewards.give(value, turn, player)
    assert values(rewards) is None


def test_a_second_reward_of_a_turn_is_refused() -> None:
    turns = turns_of("")
    rewards = TurnRewards(turns)
    rewards.give(0.0, None)
    for turn in (None, 0, turns[0]):
        with pytest.raises(
            ValueError, match=r"turn 0 has the reward 0 already, and was to get 0\.5; a turn gets one reward"
        ):
            rewards.give(0.5, turn)
    assert values(rewards) == [0.0]


def test_a_turn_that_the_loop_never_read_is_not_its_last() -> None:
    turns = turns_of("", "")
    rewards = TurnRewards(turns)
    rewards.skip(turns[1])
    rewards.give(1.0, None)
    assert values(rewards) == [1.0, 0.0]
