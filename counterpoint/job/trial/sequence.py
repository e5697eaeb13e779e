"""The sequence of intervals by which a trial decides: valid at every look, so that looking after each evaluation costs nothing.

It is the predictable plug-in empirical-Bernstein confidence sequence of Waudby-Smith and Ramdas, "Estimating means of bounded
random variables by betting" (Journal of the Royal Statistical Society B, 2024; arXiv:2010.09686, Theorem 2), with a weight that
is the same for all pairs of one evaluation. With probability 1 - `error` every interval of the sequence holds the mean of what
it is about: the weighted mean of the differences to be expected, which may be another at each evaluation, as weights are
trained. No distribution is assumed, only the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ERROR = 0.05
"""How probable it is at most that any interval of a sequence misses its mean."""

_LARGEST_WEIGHT = 0.5
"""The bound of a pair's weight that the authors recommend."""


@dataclass(frozen=True, slots=True)
class SequenceInterval:
    """An estimated mean difference, and the interval that holds it."""

    estimate: float
    low: float
    high: float


class DifferenceSequence:
    """The intervals of the mean of paired differences that lie between -`span` and `span`. They come in passes.

    Within a pass, each difference has a mean of its own, as examples have, and the pass has the mean of these: so look only
    between passes.
    """

    def __init__(self, span: float, error: float = ERROR) -> None:
        """`span` is above 0, `error` between 0 and 1; else raises `ValueError`."""
        if not (0 < span < math.inf and 0 < error < 1):
            raise ValueError(f"span = {span}, error = {error}: expected a span above 0, and an error between 0 and 1")
        self._span, self._evidence = span, math.log(2 / error)
        self.pairs = 0
        """The differences so far."""
        self._sum = self._squares = 0.0
        """The sums of the differences as numbers between 0 and 1, and of their squared distances from the mean before each."""
        self._weights = self._weighted = self._variance = 0.0

    def add(self, differences: Sequence[float], planned: int) -> None:
        """Adds one pass, of which `planned` differences were to come; failures may have taken some.

        Raises `ValueError` without a difference, or for one beyond the bounds.
        """
        scaled = (np.asarray(differences, np.float64) / self._span + 1) / 2
        count = len(scaled)
        if not count or not (np.abs(scaled - 0.5) <= 0.5 + 1e-9).all():
            raise ValueError(f"a pass needs differences, each between {-self._span} and {self._span}")
        # The mean before each pair, and the weight before the pass: neither knows what it is used for.
        before = self._sum + np.concatenate(([0.0], np.cumsum(scaled[:-1])))
        squares = float(np.sum((scaled - (0.5 + before) / (1 + self.pairs + np.arange(count))) ** 2))
        variance = (0.25 + self._squares) / (1 + self.pairs)
        until = self.pairs + planned
        weight = min(_LARGEST_WEIGHT, math.sqrt(2 * self._evidence / (variance * until * math.log(1 + until))))
        self.pairs += count
        self._weights += weight * count
        self._weighted += weight * float(scaled.sum())
        self._variance += (-math.log1p(-weight) - weight) * squares
        self._sum += float(scaled.sum())
        self._squares += squares

    @property
    def interval(self) -> SequenceInterval:
        """The newest interval; from -`span` to `span` before the first pass."""
        if not self.pairs:
            return SequenceInterval(0.0, -self._span, self._span)
        estimate, half = self._weighted / self._weights, (self._evidence + self._variance) / self._weights
        ends = (estimate, max(0.0, estimate - half), min(1.0, estimate + half))
        return SequenceInterval(*(self._span * (2 * end - 1) for end in ends))
