"""Estimates with 95 % confidence intervals, from several attempts at each of some examples.

Attempts at one example depend on each other, so that the examples, not the attempts, are the independent observations: an
estimate is a mean over examples, and its interval is that of a mean of as many observations as there are examples (clusters:
Miller, "Adding Error Bars to Evals", arXiv:2411.00640, 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_QUANTILE = 1.959963984540054
"""The quantile of the normal distribution, for 95 % two-sided."""

_STUDENT = (12.706204736, 4.302652730, 3.182446305, 2.776445105)
"""The quantiles of Student's distribution with 1 to 4 degrees of freedom, for 95 % two-sided."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % confidence interval. One observation gives a reward no interval: both ends are None."""

    value: float
    low: float | None
    high: float | None


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Returns the probability that at least one of `k` attempts, drawn without repetition from those made, succeeds.

    Unbiased for the probability that one of `k` new attempts succeeds (Chen et al., "Evaluating Large Language Models Trained on
    Code", arXiv:2107.03374, 2021). Raises `ValueError` for fewer than `k` attempts.
    """
    if not 0 <= successes <= attempts or not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} of {attempts} attempts with {successes} successes")
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def proportion(values: Sequence[float]) -> Estimate:
    """Estimates the mean of observations between 0 and 1, one for each example, by Wilson's interval.

    Wilson (1927) derived it for observations that are 0 or 1. A variable between 0 and 1 with mean p varies by at most p (1 - p)
    (Bhatia and Davis, 2000), so that it is at least as wide as needed for others. Unlike an interval from the observed
    variance, it has a width where all examples passed, or none. Raises `ValueError` without observations.
    """
    count = _count(values)
    mean = math.fsum(values) / count
    square = _QUANTILE**2
    centre = (mean + square / (2 * count)) / (1 + square / count)
    half = _QUANTILE / (1 + square / count) * math.sqrt(mean * (1 - mean) / count + square / (4 * count**2))
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def mean(values: Sequence[float]) -> Estimate:
    """Estimates the mean of observations, one for each example, by Student's interval. Raises `ValueError` without any."""
    count = _count(values)
    value = math.fsum(values) / count
    if count == 1:
        return Estimate(value, None, None)
    variance = math.fsum((each - value) ** 2 for each in values) / (count - 1)
    half = _student(count - 1) * math.sqrt(variance / count)
    return Estimate(value, value - half, value + half)


def _count(values: Sequence[float]) -> int:
    if not values:
        raise ValueError("an estimate needs at least one example")
    return len(values)


def _student(degrees: int) -> float:
    """Returns Student's quantile for 95 % two-sided (Abramowitz and Stegun, 26.7.5, to within 0.001 from 5 degrees on)."""
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    z = _QUANTILE
    terms: tuple[float, ...] = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, 1))
