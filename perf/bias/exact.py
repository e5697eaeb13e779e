"""Recovers the fraction that a number of the real code stands for.

The product computes in floating point: advantages travel as float32, and a loss is differentiated here in float64. All that a
case puts in are small fractions, so what comes out is one, unless the formula has a root, an exponential or a logarithm. The
nearest fraction with a denominator up to `LARGEST_DENOMINATOR` counts as recovered if it is within the type's rounding. Two such
fractions are farther apart than two roundings, so at most one fits; a number that is none fits by chance once in 10,000 at most.
Where none fits, the number's own value is taken, and the result says that it is not exact.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import NamedTuple


class Recovered(NamedTuple):
    """A fraction, and whether it is what the number stands for, not merely its value."""

    value: Fraction
    exact: bool


LARGEST_DENOMINATOR = {24: 12, 53: 2**15}
"""Maps the bits of a significand (24: float32, 53: float64) to the largest denominator that is recovered from such a number."""

_ROUNDINGS = 64
"""Roundings, in units of the last place, that a result may have met on its way."""


@cache
def recovered(value: float, digits: int = 53) -> Recovered:
    """Returns the fraction that a number stands for, which was computed with a significand of so many bits: 53, or 24."""
    fraction = Fraction(value).limit_denominator(LARGEST_DENOMINATOR[digits])
    within = abs(fraction - Fraction(value)) <= Fraction(_ROUNDINGS, 2**digits) * max(Fraction(1), abs(fraction))
    return Recovered(fraction if within else Fraction(value), within)
