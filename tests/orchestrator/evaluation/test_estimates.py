"""pass@k beside all choices of k attempts; the intervals beside scipy's, and their coverage in simulated evaluations."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from counterpoint.orchestrator.evaluation.estimates import mean, pass_at_k, proportion


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


@pytest.mark.parametrize(("passed", "examples"), [(0, 1), (0, 20), (20, 20), (7, 20), (500, 1000)])
def test_the_interval_of_a_bounded_mean_is_clopper_s_and_pearson_s_for_two_values(passed: int, examples: int) -> None:
    found = mean([5.0] * passed + [-5.0] * (examples - passed), (-5.0, 5.0))
    expected = stats.binomtest(passed, examples).proportion_ci(0.95, method="exact")
    assert (found.low, found.high) == pytest.approx((10 * expected.low - 5, 10 * expected.high - 5), abs=0.06)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.floats(-2, 3), min_size=1, max_size=30))
def test_the_interval_of_a_bounded_mean_lies_within_its_bounds(values: list[float]) -> None:
    found = mean(values, (-2.0, 3.0))
    assert found.low is not None
    assert found.high is not None
    assert -2 - 1e-12 <= found.low <= found.value <= found.high <= 3 + 1e-12
    assert found == mean(values[::-1], (-2.0, 3.0))


def test_equal_rewards_are_no_certainty_and_students_interval_leaves_the_bounds() -> None:
    assert mean([1.0] * 20).low == 1.0
    assert mean([1.0] * 20, (0.0, 1.0)).low == pytest.approx(0.832, abs=0.005)
    few = [0.0] * 18 + [0.3, 1.0]
    students, bounded = mean(few), mean(few, (0.0, 1.0))
    assert students.low is not None
    assert bounded.low is not None
    assert students.low < 0 < bounded.low


@pytest.mark.slow
@pytest.mark.parametrize("values", [(0.0, 1.0), (0.0, 0.3, 1.0), (0.9, 0.95, 1.0)])
@pytest.mark.parametrize("examples", [5, 40])
def test_the_interval_of_a_bounded_mean_contains_the_truth_as_often_as_it_says(
    values: tuple[float, ...], examples: int
) -> None:
    """Over all samples of so many examples, each weighed by its probability: most rewards are the lowest or the highest."""
    for chances in ((0.9, 0.1), (0.02, 0.98)) if len(values) == 2 else ((0.85, 0.1, 0.05), (0.01, 0.04, 0.95)):
        truth = sum(value * chance for value, chance in zip(values, chances, strict=True))
        covered = uncovered = 0.0
        for counts in itertools.product(range(examples + 1), repeat=len(values) - 1):
            if (last := examples - sum(counts)) < 0:
                continue
            likely = float(stats.multinomial.pmf((*counts, last), examples, chances))
            if likely < 1e-5:
                continue
            sample = [value for value, count in zip(values, (*counts, last), strict=True) for _ in range(count)]
            found = mean(sample, (0.0, 1.0))
            assert found.low is not None
            assert found.high is not None
            if found.low <= truth <= found.high:
                covered += likely
            else:
                uncovered += likely
        assert covered + uncovered > 0.99
        assert uncovered <= 0.05
