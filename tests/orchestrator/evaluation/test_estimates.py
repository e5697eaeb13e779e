"""pass@k beside all choices of k attempts; the intervals beside scipy's, and their coverage in simulated evaluations."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from orchestrator.evaluation.estimates import mean, pass_at_k, proportion


@pytest.mark.parametrize("attempts", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_with_a_success(attempts: int) -> None:
    for successes, k in itertools.product(range(attempts + 1), range(1, attempts + 1)):
        choices = list(itertools.combinations([1] * successes + [0] * (attempts - successes), k))
        expected = Fraction(sum(any(choice) for choice in choices), len(choices))
        assert pass_at_k(attempts, successes, k) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(("attempts", "successes", "k"), [(3, 4, 1), (3, 1, 4), (3, 1, 0), (0, 0, 1)])
def test_pass_at_k_refuses_what_has_no_meaning(attempts: int, successes: int, k: int) -> None:
    with pytest.raises(ValueError, match="attempts"):
        pass_at_k(attempts, successes, k)


def test_pass_at_k_of_many_attempts_is_exact() -> None:
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01, abs=1e-12)


@pytest.mark.parametrize(("passed", "examples"), [(0, 1), (1, 1), (0, 20), (20, 20), (7, 20), (500, 1000)])
def test_the_interval_of_a_proportion_is_wilsons(passed: int, examples: int) -> None:
    found = proportion([1.0] * passed + [0.0] * (examples - passed))
    expected = stats.binomtest(passed, examples).proportion_ci(0.95, method="wilson")
    assert found.value == passed / examples
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_an_interval_contains_its_value(values: list[float]) -> None:
    found = proportion(values)
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low <= found.value <= found.high <= 1 + 1e-12


@pytest.mark.parametrize("examples", [2, 3, 5, 6, 10, 30, 1000])
def test_the_interval_of_a_mean_is_students(examples: int) -> None:
    choose = random.Random(examples)
    values = [choose.gauss(3, 2) for _ in range(examples)]
    found = mean(values)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=2e-3)


def test_one_example_gives_a_mean_without_interval() -> None:
    assert (mean([2.0]).low, mean([2.0]).high) == (None, None)


def test_the_intervals_contain_the_truth_as_often_as_they_say() -> None:
    """1,000 evaluations of 40 examples of differing difficulty, with 4 attempts at each."""
    choose = random.Random(0)
    covered = {1: 0, 2: 0}
    truth = {1: 0.5, 2: 1 - 1 / 3}  # difficulty is uniform: the mean of p, and of 1 - (1 - p)^2
    for _ in range(1000):
        chances = [choose.random() for _ in range(40)]
        successes = [sum(choose.random() < chance for _ in range(4)) for chance in chances]
        for k in covered:
            found = proportion([pass_at_k(4, each, k) for each in successes])
            assert found.low is not None
            assert found.high is not None
            covered[k] += found.low <= truth[k] <= found.high
    assert min(covered.values()) >= 940
