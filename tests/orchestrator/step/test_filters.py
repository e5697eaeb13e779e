"""Filters: each against a plain-Python definition, and how monitoring, enforcing and counting work together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.orchestrator.step.filters import (
    apply_filters,
    are_gibberish,
    are_repetitive,
    has_zero_advantage,
    repeated_ngrams,
    with_vocabulary,
)
from counterpoint.run.config import FilterConfig, GibberishFilter, RepetitionFilter, ZeroAdvantageFilter
from counterpoint.transport.records import Rollout
from tests.support.rollouts import make_group, make_turn


def make_rollout(*completions: list[int], log_probabilities: list[float] | None = None) -> Rollout:
    turns = [make_turn([1, 2], completion, log_probabilities=log_probabilities) for completion in completions]
    return Rollout("5-0", 5, "words", 11, turns=turns, reward=1.0)


TOKENS = st.integers(0, 3) | st.integers(2**31 - 3, 2**31 - 1)


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(st.tuples(st.lists(TOKENS, min_size=n, max_size=30), st.integers(1, 12)), min_size=1, max_size=4),
        )
    )
)
def test_repeated_ngrams_are_found_exactly(case: tuple[int, list[tuple[list[int], int]]]) -> None:
    ngram, turns = case
    expected = []
    for completion, reach in turns:
        grams = [tuple(completion[start : start + ngram]) for start in range(len(completion) - ngram + 1)]
        expected += [gram in grams[max(0, index - reach) : index] for index, gram in enumerate(grams)]
    arrays = [np.array(completion, dtype=np.int32) for completion, _ in turns]
    assert repeated_ngrams(arrays, ngram, np.array([reach for _, reach in turns])).tolist() == expected


def prose(count: int, seed: int = 0) -> list[int]:
    """Tokens as rare and as frequent as words are: the one of rank r comes with a probability of about 1/r (Zipf's law)."""
    return np.random.default_rng(seed).zipf(1.2, count).clip(max=30_000).tolist()


def table(rows: int, words: int) -> list[int]:
    """Rows of the same words around their number, in one token, and another number, in two digits."""
    chosen = np.random.default_rng(1).integers(10, 100, rows)
    return [
        token
        for row, other in enumerate(chosen.tolist())
        for token in (40_000 + row, *range(50, 50 + words), 10 + other // 10, 10 + other % 10, 9)
    ]


@pytest.mark.parametrize(
    ("completions", "caught"),
    [
        ([[7] * 20], True),
        ([[1, 2] * 10], True),
        ([list(range(20))], False),
        ([list(range(20)), [7] * 20], True),  # one bad turn is enough
        ([[7] * 5], False),  # too short to tell
        ([[]], False),
        ([prose(16_000)], False),
        ([prose(12_000) + prose(300, 1) * 13], True),  # a loop at the end
        ([prose(12_000) + prose(40, 1) * 100], True),
        ([prose(6_000) + prose(40, 1) * 100 + prose(6_000, 2)], True),  # or one that it came out of
        ([prose(12_000) + prose(40, 1) * 3 + prose(50, 2)], False),
        ([prose(700) * 2], False),  # an answer that repeats its draft
        ([table(300, 4)], False),
        ([table(300, 12)], False),
        ([table(300, 40)], False),
        ([prose(3_000) + table(300, 12)], False),
    ],
)
def test_repetition(completions: list[list[int]], caught: bool) -> None:
    assert are_repetitive(RepetitionFilter(), [make_rollout(*completions)]) == [caught]


def test_repetition_at_exactly_the_share_is_not_above_it() -> None:
    half = RepetitionFilter(ngram=1, minimum=1, share_above=0.5)
    exactly, above = make_rollout([1, 1, 2, 2]), make_rollout([1, 1, 1, 1])
    assert are_repetitive(half, [exactly, above]) == [False, True]


@pytest.mark.parametrize("at_once", [1, 50, 2**17])
def test_each_rollout_of_a_group_is_caught_by_its_own_turns(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.orchestrator.step.filters._TOKENS_AT_ONCE", at_once)
    loop, text, short = [7] * 20, prose(40), [7] * 5
    group = [make_rollout(text), make_rollout(text, loop), make_rollout(short), make_rollout(loop), make_rollout(text)]
    assert are_repetitive(RepetitionFilter(), group) == [False, True, False, True, False]
    assert are_repetitive(RepetitionFilter(), []) == []


@pytest.mark.parametrize(
    ("log_probabilities", "caught"),
    [([-13.0, -1.0, -1.0, -1.0], True), ([-13.0, -1.0, -1.0, -1.0, -1.0], False), ([], False), ([-12.0], False)],
)
def test_gibberish(log_probabilities: list[float], caught: bool) -> None:
    rollout = make_rollout(list(range(len(log_probabilities))), log_probabilities=log_probabilities)
    assert are_gibberish(GibberishFilter(log_probability_below=-12.0), [rollout]) == [caught]


def sampled(vocabulary: int, sharpness: float, count: int = 2000) -> list[float]:
    """Log-probabilities of tokens that a model samples whose logits are normally distributed, `sharpness` their deviation. Zero
    is the uniform distribution."""
    generator = np.random.default_rng(0)
    logits = sharpness * generator.standard_normal(vocabulary)
    log_probabilities = logits - np.logaddexp.reduce(logits)
    probabilities = np.exp(log_probabilities)
    return generator.choice(log_probabilities, count, p=probabilities / probabilities.sum()).tolist()


@pytest.mark.parametrize("vocabulary", [260, 32_000, 152_000])
@pytest.mark.parametrize(("sharpness", "caught"), [(0.0, True), (1.0, True), (8.0, False)])
def test_gibberish_is_relative_to_the_vocabulary(vocabulary: int, sharpness: float, caught: bool) -> None:
    (config,) = with_vocabulary([GibberishFilter()], vocabulary)
    assert isinstance(config, GibberishFilter)
    rollout = make_rollout(list(range(2000)), log_probabilities=sampled(vocabulary, sharpness))
    assert are_gibberish(config, [rollout]) == [caught]


def test_gibberish_is_a_share_of_all_turns_together() -> None:
    rollout = make_rollout([1], log_probabilities=[-20.0])
    rollout.turns.append(make_turn([1, 2], range(9)))
    assert are_gibberish(GibberishFilter(log_probability_below=-12.0, share_above=0.2), [rollout]) == [False]


def test_a_threshold_that_is_set_stays() -> None:
    filters: list[FilterConfig] = [GibberishFilter(log_probability_below=-3.0), ZeroAdvantageFilter()]
    assert with_vocabulary(filters, 32_000) == filters


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
