"""A Gaussian process of what configurations gain, as time goes on: the model of population based bandits.

Two places x and y at times t and u have the covariance `exp(-|x-y|^2 / (2 l^2)) * (1 - e)^(|t-u| / 2)` (Bogunovic et al.,
Time-Varying Gaussian Process Bandit Optimization, https://arxiv.org/abs/1601.06650). Length l, forgetting e and the noise are
those of a grid with the highest marginal likelihood.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

MOST_OBSERVATIONS = 200
"""The newest are used: a fit takes the cube of their number."""

FEWEST_OBSERVATIONS = 3
"""With fewer a place is drawn at random."""

CANDIDATES = 1000

LENGTHS = (0.1, 0.2, 0.4, 0.8, 1.6)
FORGETTING = (0.0, 0.03, 0.1, 0.3)
NOISES = (1e-3, 1e-2, 1e-1)

CONFIDENCE = (0.2, 0.4)
"""c1 and c2: the bound is the mean and sqrt(c1 + log(c2 n)) deviations, as in Ray Tune's PB2."""


class GainModel:
    """What was gained where and when. Places are `[dimensions]`, each from 0 to 1."""

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        self._seen: list[list[float]] = []
        """Time, gain and place of each observation."""

    def observe(self, time: float, place: list[float], gain: float) -> None:
        """Takes an observation; one that is no number is left out."""
        if all(map(math.isfinite, (time, gain, *place))):
            self._seen = [*self._seen, [time, gain, *place]][-MOST_OBSERVATIONS:]

    def best(self, time: float, pending: list[list[float]], generator: random.Random) -> list[float]:
        """The place with the highest upper confidence bound of the gain at a time, of some that are drawn.

        `pending` are places that are being tried: nothing is known of their gains, but they need not be tried again.
        """
        drawn = np.random.default_rng(generator.getrandbits(64)).random((CANDIDATES, self._dimensions))
        if len(self._seen) < FEWEST_OBSERVATIONS:
            return [float(each) for each in drawn[0]]
        table = np.asarray(self._seen)
        gains_N = table[:, 1]
        spread = float(gains_N.std()) or 1.0
        scaled_N = (gains_N - gains_N.mean()) / spread
        step = float(np.diff(np.unique(np.append(table[:, 0], time))).mean() or 1.0)
        times_N, places_ND = table[:, 0] / step, table[:, 2:]
        fit = max(
            itertools.product(LENGTHS, FORGETTING, NOISES),
            key=lambda each: _likelihood(
                _covariance(places_ND, places_ND, times_N, times_N, *each[:2]), scaled_N, each[2]
            ),
        )
        now = time / step
        at_now = np.full(CANDIDATES, now)
        mean = _posterior(places_ND, times_N, scaled_N, drawn, at_now, fit)[0]
        if pending:
            places_ND = np.vstack([places_ND, pending])
            times_N = np.append(times_N, np.full(len(pending), now))
            scaled_N = np.append(scaled_N, np.zeros(len(pending)))
        deviation = _posterior(places_ND, times_N, scaled_N, drawn, at_now, fit)[1]
        c1, c2 = CONFIDENCE
        bound = mean + math.sqrt(c1 + max(0.0, math.log(c2 * len(self._seen)))) * deviation
        return [float(each) for each in drawn[int(np.argmax(bound))]]

    def state(self) -> list[list[float]]:
        """The observations."""
        return [list(each) for each in self._seen]

    def restore_state(self, state: list[list[float]]) -> None:
        """Takes back what `state` returned."""
        self._seen = [list(each) for each in state]


def _covariance(x: Numbers, y: Numbers, t: Numbers, u: Numbers, length: float, forgetting: float) -> Numbers:
    distance = ((x[:, None, :] - y[None, :, :]) ** 2).sum(-1)
    apart = np.abs(t[:, None] - u[None, :])
    made: Numbers = np.exp(-distance / (2 * length**2)) * (1 - forgetting) ** (apart / 2)
    return made


def _likelihood(covariance: Numbers, gains: Numbers, noise: float) -> float:
    factor = np.linalg.cholesky(covariance + noise * np.eye(len(gains)))
    whitened = np.linalg.solve(factor, gains)
    return float(-0.5 * whitened @ whitened - np.log(np.diag(factor)).sum())


def _posterior(
    places: Numbers, times: Numbers, gains: Numbers, at: Numbers, when: Numbers, fit: Any
) -> tuple[Numbers, Numbers]:
    """Mean and deviation of the gain at some places and times."""
    length, forgetting, noise = fit
    known = _covariance(places, places, times, times, length, forgetting) + noise * np.eye(len(gains))
    cross = _covariance(places, at, times, when, length, forgetting)
    factor = np.linalg.cholesky(known)
    whitened = np.linalg.solve(factor, cross)
    mean = whitened.T @ np.linalg.solve(factor, gains)
    return mean, np.sqrt(np.clip(1 - (whitened**2).sum(0), 0, None))
