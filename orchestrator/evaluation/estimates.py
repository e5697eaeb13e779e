"""Estimates with 95 % confidence intervals, from several attempts at each of some examples.

Attempts at one example depend on each other, so the examples are the independent observations. An estimate is a mean over
examples, and its interval is that of a mean of as many observations as there are examples (clusters: Miller, "Adding Error Bars
to Evals", arXiv:2411.00640, 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_QUANTILE = 1.959963984540054
"""The quantile of the normal distribution, for 95 % two-sided."""

_STUDENT = (12.706204736, 4.302652730, 3.182446305, 2.776445105)
"""The quantiles of Student's distribution with 1 to 4 degrees of freedom, for 95 % two-sided."""

_DRAWS = 10_000
"""Draws of a quantile of 2.5 %: the share beyond it has a standard error of 0.16 %."""

_GRID = 1000
"""Different values of an observation between its bounds. One in between moves to the next, away from the mean's other end."""

_DRAWN_AT_ONCE = 2**20
"""Numbers, 8 bytes each."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % confidence interval. One observation without bounds has no interval: both ends are None."""

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

    Wilson (1927) derived it for observations that are 0 or 1. A variable between 0 and 1 with mean p varies by at most p (1 -
    p) (Bhatia and Davis, 2000), so for others the interval is at least as wide as needed. Unlike an interval from the observed
    variance, it has a width if all examples passed, or none. Raises `ValueError` without observations.
    """
    count = _count(values)
    mean = math.fsum(values) / count
    square = _QUANTILE**2
    centre = (mean + square / (2 * count)) / (1 + square / count)
    half = _QUANTILE / (1 + square / count) * math.sqrt(mean * (1 - mean) / count + square / (4 * count**2))
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def mean(values: Sequence[float], bounds: tuple[float, float] | None = None) -> Estimate:
    """Estimates the mean of observations, one for each example. Raises `ValueError` without any.

    With `bounds`, the least and the greatest value of an observation, the interval lies within them, and has a width also if
    all observations are equal. Its upper end is the quantile of the mean of the observations and one more at the upper bound,
    under weights that are uniform on the simplex (Gaffke, "Three test statistics for a nonparametric one-sided hypothesis on
    the mean of a nonnegative variable", 2005). The lower end is computed likewise. For two values it is Clopper's and Pearson's
    exact interval. That it covers the mean of every distribution at every size is conjectured, and no exception is known
    (Learned-Miller and Thomas, arXiv:1905.06208, 2019, and Phan et al., arXiv:2106.03163, 2021).

    Without bounds it is Student's interval, which leaves the range of a bounded observation.
    """
    count = _count(values)
    value = math.fsum(values) / count
    if bounds is not None:
        least, greatest = bounds
        from_least = np.clip((np.asarray(values, np.float64) - least) / (greatest - least), 0.0, 1.0)  # rounding
        low, high = 1.0 - _upper_end(1.0 - from_least), _upper_end(from_least)
        span = greatest - least
        return Estimate(value, min(value, least + span * low), max(value, least + span * high))
    if count == 1:
        return Estimate(value, None, None)
    variance = math.fsum((each - value) ** 2 for each in values) / (count - 1)
    half = _student(count - 1) * math.sqrt(variance / count)
    return Estimate(value, value - half, value + half)


def _upper_end(values: npt.NDArray[np.float64]) -> float:
    """Returns Gaffke's upper bound of 97.5 % for the mean of `values`, `[examples]`, between 0 and 1. The same each time."""
    on_grid = np.ceil(values * _GRID - 1e-6) / _GRID
    different, counts = np.unique(np.append(on_grid, 1.0), return_counts=True)
    random = np.random.default_rng(0)
    drawn = []
    for portion in np.array_split(np.arange(_DRAWS), math.ceil(_DRAWS * len(different) / _DRAWN_AT_ONCE)):
        weights = random.standard_gamma(counts, (len(portion), len(different)))  # gammas over their sum are uniform
        drawn.append(weights @ different / weights.sum(axis=1))
    return min(1.0, float(np.quantile(np.concatenate(drawn), 0.975)))


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
