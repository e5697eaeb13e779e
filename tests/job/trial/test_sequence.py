"""The sequence of intervals: it is the published one, and holds its mean at every look."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.job.trial.sequence import DifferenceSequence


def published(passes: list[list[float]], span: float, error: float) -> tuple[float, float]:
    """Theorem 2 of arXiv:2010.09686, pair by pair as it is printed, with a weight for each pass."""
    seen: list[float] = []
    numerator = denominator = boundary = 0.0
    squares = 0.25
    for differences in passes:
        variance = squares / (len(seen) + 1)
        until = len(seen) + len(differences)
        weight = min(0.5, math.sqrt(2 * math.log(2 / error) / (variance * until * math.log(until + 1))))
        for difference in differences:
            x = (difference / span + 1) / 2
            v = 4 * (x - (0.5 + sum(seen)) / (len(seen) + 1)) ** 2
            boundary += v * (-math.log(1 - weight) - weight) / 4
            squares += v / 4
            numerator, denominator = numerator + weight * x, denominator + weight
            seen.append(x)
    half = (math.log(2 / error) + boundary) / denominator
    middle = numerator / denominator
    return span * (2 * max(0.0, middle - half) - 1), span * (2 * min(1.0, middle + half) - 1)


passes_of = st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=6), min_size=1, max_size=6)


@given(passes_of, st.floats(0.1, 10), st.floats(0.001, 0.5))
def test_it_is_the_published_one(passes: list[list[float]], span: float, error: float) -> None:
    scaled = [[span * each for each in one] for one in passes]
    sequence = DifferenceSequence(span, error)
    for one in scaled:
        sequence.add(one, len(one))
    now = sequence.interval
    assert (now.low, now.high) == pytest.approx(published(scaled, span, error))
    assert -span <= now.low <= now.estimate + 1e-9 <= now.high + 2e-9 <= span + 3e-9


@given(passes_of)
def test_the_other_way_round_it_is_the_mirror(passes: list[list[float]]) -> None:
    one, other = DifferenceSequence(1.0), DifferenceSequence(1.0)
    for differences in passes:
        one.add(differences, len(differences))
        other.add([-each for each in differences], len(differences))
    assert (one.interval.low, one.interval.high) == pytest.approx((-other.interval.high, -other.interval.low))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("called", "values", "chances"),
    [
        ("fair", [-1.0, 1.0], [0.5, 0.5]),
        ("rare", [0.0, 1.0], [0.98, 0.02]),
        ("mostly equal", [-1.0, 0.0, 1.0], [0.02, 0.96, 0.02]),
        ("skewed", [-1.0, 0.25], [0.2, 0.8]),
    ],
)
def test_no_look_of_a_hundred_misses_the_mean_more_often_than_promised(
    called: str, values: list[float], chances: list[float]
) -> None:
    """Of 300 sequences with 100 looks each; with 5 % each, 28 or more have a chance of 0.1 %."""
    mean, random, missed = float(np.dot(values, chances)), np.random.default_rng(7), 0
    for _ in range(300):
        sequence, held = DifferenceSequence(1.0), True
        for drawn in random.choice(values, (100, 8), p=chances):
            sequence.add(drawn.tolist(), 8)
            held &= sequence.interval.low <= mean <= sequence.interval.high
        missed += not held
    assert missed <= 28, called


@pytest.mark.slow
def test_it_holds_the_mean_of_means_that_change_with_what_was_seen() -> None:
    """A branch that is ahead gets further ahead: each pass has another mean, and so has each example."""
    random, missed = np.random.default_rng(8), 0
    for _ in range(200):
        sequence, held, means, weights = DifferenceSequence(1.0), True, 0.0, 0.0
        for _ in range(50):
            drift = 0.4 * sequence.interval.estimate
            own = np.clip(drift + np.linspace(-0.5, 0.5, 8), -1, 1)
            before = sequence._weights
            sequence.add(np.where(random.random(8) < (1 + own) / 2, 1.0, -1.0).tolist(), 8)
            weight = sequence._weights - before
            means, weights = means + weight * float(own.mean()), weights + weight
            held &= sequence.interval.low <= means / weights <= sequence.interval.high
        missed += not held
    assert missed <= 20


@pytest.mark.parametrize("differences", [[], [1.1], [float("nan")], [float("inf")]])
def test_what_is_no_difference_is_refused(differences: list[float]) -> None:
    sequence = DifferenceSequence(1.0)
    with pytest.raises(ValueError, match="each between -1"):
        sequence.add(differences, 1)
    assert (sequence.pairs, sequence.interval.low, sequence.interval.high) == (0, -1.0, 1.0)


@pytest.mark.parametrize(("span", "error"), [(0.0, 0.05), (float("inf"), 0.05), (1.0, 0.0), (1.0, 1.0)])
def test_wrong_bounds_are_refused(span: float, error: float) -> None:
    with pytest.raises(ValueError, match="expected a span above 0"):
        DifferenceSequence(span, error)
