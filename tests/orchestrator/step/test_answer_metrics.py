"""What a step's answers say of the run's health."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from counterpoint.orchestrator.step.step_metrics import answer_metrics
from counterpoint.transport.records import Rollout
from tests.support.rollouts import make_rollout, make_turn

TURNS = partial(np.array, dtype=np.float32)
THREE = [make_turn([1], [9])] * 3


def played(
    group: int, index: int, answer: Sequence[int], reward: float = 0.0, cut: bool = False, **fields: Any
) -> Rollout:
    turn = replace(make_turn([1, 2], answer), finish_reason="length" if cut else "stop")
    return make_rollout(group, index, turns=[make_turn([1], [9]), turn], reward=reward, **fields)


def test_cut_answers_and_their_reward_by_environment() -> None:
    rollouts = [
        played(0, 0, [4, 5], 0.25, cut=True),
        played(0, 1, [4], 0.75, cut=True),
        played(0, 2, [5], 1.0),
        played(1, 0, [6], 1.0, environment="other"),
    ]
    metrics = answer_metrics(rollouts)
    assert (metrics["length/cut"], metrics["length/toy/cut"], metrics["length/other/cut"]) == (0.5, 2 / 3, 0.0)
    assert metrics["length/toy/cut_reward"] == 0.5
    assert "length/other/cut_reward" not in metrics


def test_groups_without_a_difference_and_repeated_answers() -> None:
    same = [played(0, index, [4, 5]) for index in range(4)]
    other = [played(1, 0, [4, 5], 1.0), played(1, 1, [4, 6]), played(1, 2, [4, 5])]
    lone = [played(2, 0, [7])]  # no group to compare in
    metrics = answer_metrics([*same, *other, *lone])
    assert metrics["groups/no_difference"] == 0.5
    assert metrics["answers/toy/repeated"] == 4 / 8
    assert "answers/toy/shared" not in metrics  # too few examples


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        ({}, {}, True),
        ({"player_rewards": {"a": 1.0, "b": -1.0}}, {"player_rewards": {"a": -1.0, "b": 1.0}}, False),
        ({"player_rewards": {"a": 1.0, "b": -1.0}}, {"player_rewards": {"a": 1.0, "b": -1.0}}, True),
        ({"turn_rewards": TURNS([1, 0])}, {"turn_rewards": TURNS([0, 1])}, False),
        ({"turn_rewards": TURNS([0, 1])}, {"turn_rewards": TURNS([0, 1])}, True),
        ({"turn_rewards": TURNS([0, 1])}, {"turn_rewards": TURNS([0, 0, 1]), "turns": THREE}, True),
        ({"reward": 1.0}, {"reward": 1.0, "turns": THREE}, True),
        ({"reward": 1.0, "turn_rewards": TURNS([1, 0])}, {"reward": 1.0}, False),  # all of it is the last turn's
    ],
)
def test_rewards_of_players_and_of_turns_may_differ(first: dict[str, Any], second: dict[str, Any], alike: bool) -> None:
    rollouts = [replace(played(0, index, [4]), **fields) for index, fields in enumerate((first, second))]
    assert answer_metrics(rollouts)["groups/no_difference"] == float(alike)


def test_the_answers_that_other_examples_got_too() -> None:
    rollouts = [played(group, index, [4] if group < 2 else [5, group]) for group in range(4) for index in range(2)]
    assert answer_metrics(rollouts)["answers/toy/shared"] == 4 / 8
    again = [replace(rollout, group_id=9 + rollout.group_id) for rollout in rollouts[4:]]  # of the same examples
    assert answer_metrics([*rollouts, *again])["answers/toy/shared"] == 4 / 12


def test_answers_of_other_turns_are_others() -> None:
    """Two turns with the tokens of one are another answer."""
    first = make_rollout(0, 0, turns=[make_turn([1], [4, 5])])
    second = make_rollout(0, 1, turns=[make_turn([1], [4]), make_turn([1], [5])])
    assert answer_metrics([first, second])["answers/toy/repeated"] == 0.0
