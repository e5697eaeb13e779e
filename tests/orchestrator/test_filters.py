"""Filters: each against a plain-Python definition, and how monitoring, enforcing and counting work together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config import FilterConfig, GibberishFilter, RepetitionFilter, ZeroAdvantageFilter
from orchestrator.filters import (
    apply_filters,
    count_distinct_ngrams,
    has_zero_advantage,
    is_gibberish,
    is_repetitive,
)
from tests.orchestrator.rollouts_for_tests import make_group, make_turn
from transport.records import Rollout


def make_rollout(*completions: list[int], log_probabilities: list[float] | None = None) -> Rollout:
    turns = [make_turn(completion, log_probabilities=log_probabilities) for completion in completions]
    return Rollout("5-0", 5, "words", 11, turns=turns, reward=1.0)


TOKENS = st.integers(0, 3) | st.integers(2**31 - 3, 2**31 - 1)


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.lists(TOKENS, min_size=n), min_size=1))))
def test_distinct_ngrams_are_counted_exactly(case: tuple[int, list[list[int]]]) -> None:
    ngram, completions = case
    windows = [{tuple(c[start : start + ngram]) for start in range(len(c) - ngram + 1)} for c in completions]
    arrays = [np.array(completion, dtype=np.int32) for completion in completions]
    assert count_distinct_ngrams(arrays, ngram).tolist() == [len(different) for different in windows]


@pytest.mark.parametrize(
    ("completions", "caught"),
    [
        ([[7] * 20], True),
        ([[1, 2] * 10], True),
        ([list(range(20))], False),
        ([list(range(20)), [7] * 20], True),  # one bad turn is enough
        ([[7] * 5], False),  # too short to tell
        ([[]], False),
    ],
)
def test_repetition(completions: list[list[int]], caught: bool) -> None:
    assert is_repetitive(RepetitionFilter(), make_rollout(*completions)) is caught


def test_repetition_at_exactly_the_share_is_not_above_it() -> None:
    half = RepetitionFilter(ngram=1, minimum=1, share_above=0.5)
    assert not is_repetitive(half, make_rollout([1, 1, 2, 2]))
    assert is_repetitive(half, make_rollout([1, 1, 1, 1]))


@pytest.mark.parametrize(
    ("log_probabilities", "caught"),
    [([-13.0, -1.0, -1.0, -1.0], True), ([-13.0, -1.0, -1.0, -1.0, -1.0], False), ([], False), ([-12.0], False)],
)
def test_gibberish(log_probabilities: list[float], caught: bool) -> None:
    rollout = make_rollout(list(range(len(log_probabilities))), log_probabilities=log_probabilities)
    assert is_gibberish(GibberishFilter(), rollout) is caught


def test_gibberish_is_a_share_of_all_turns_together() -> None:
    rollout = make_rollout([1], log_probabilities=[-20.0])
    rollout.turns.append(make_turn(list(range(9))))
    assert not is_gibberish(GibberishFilter(share_above=0.2), rollout)


@pytest.mark.parametrize(("advantage", "caught"), [(0.0, True), (-1e-12, True), (1e-6, False), (-0.5, False)])
def test_zero_advantage(advantage: float, caught: bool) -> None:
    rollout = make_rollout([1])
    rollout.advantage = advantage
    assert has_zero_advantage(rollout) is caught


def test_the_first_enforcing_filter_removes_and_every_filter_counts() -> None:
    filters: list[FilterConfig] = [
        RepetitionFilter(mode="monitor"),
        ZeroAdvantageFilter(mode="enforce"),
        RepetitionFilter(mode="enforce", share_above=0.1),
    ]
    repetitive = make_rollout([7] * 20)
    also_words, numbers = make_group([0.0])[0], make_group([0.0], environment="numbers")[0]
    also_words.advantage = 1.0
    also_words.filtered_by = "left over"
    counts = apply_filters(filters, [repetitive, also_words, numbers])
    assert [rollout.filtered_by for rollout in (repetitive, also_words, numbers)] == [
        "zero_advantage",
        None,
        "zero_advantage",
    ]
    assert counts == {("repetition", "words"): 2, ("zero_advantage", "words"): 1, ("zero_advantage", "numbers"): 1}
