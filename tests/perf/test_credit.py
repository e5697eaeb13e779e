"""What rewards of turns save, with one seed: fewer tokens where they say which turn mattered, the same where they say nothing."""

from __future__ import annotations

import pytest

from perf.credit import ratio, tokens_until_right


@pytest.mark.slow
def test_a_known_turn_saves_tokens_and_an_unknown_one_costs_none() -> None:
    one = tokens_until_right("late", "leave_one_out", 0.02, seed=0)
    assert tokens_until_right("late", "turn_returns", 0.02, seed=0) == one
    assert tokens_until_right("early", "turn_returns", 0.02, seed=0) < 0.8 * one


def test_a_ratio_has_its_interval() -> None:
    assert ratio([2, 2, 2], [4, 4, 4]) == (0.5, 0.5, 0.5)
    found, low, high = ratio([1, 3], [4, 4])
    assert low < found == 0.5 < high
