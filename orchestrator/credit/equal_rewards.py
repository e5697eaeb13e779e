"""Differences between rewards, where those that differ by float32's rounding only count as equal.

A rounding error would pass the zero-advantage filter, and divided by its deviation, or a step's, it would become 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

ROUNDING = 1e-6
"""Rewards that differ by less than this share of the largest count as equal: reward models compute in float32, with seven digits.
Divided by its own deviation, the rounding error of one addition would become an advantage of 1."""


def differ(rewards: npt.ArrayLike) -> bool:
    """Tells whether rewards differ by more than rounding."""
    return bool(_differing(np.asarray(rewards)))


def _differing(rewards: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Tells the same of each column of `[rollouts, ...]`."""
    found: npt.NDArray[np.bool_] = np.ptp(rewards, axis=0) > ROUNDING * np.abs(rewards).max(axis=0)
    return found


def centred(rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns rewards minus their mean, `[rollouts]`, exactly zero if all are equal."""
    if not differ(rewards):
        return np.zeros_like(rewards)
    shifted = rewards - rewards[0]
    result: npt.NDArray[np.float64] = shifted - shifted.mean()
    return result


def above_others(rewards: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns rewards minus the mean of the other rollouts', `[rollouts, ...]`, for each column alone.

    Exactly zero where all of a column are equal, and for a single rollout. The dtype stays.
    """
    count = len(rewards)
    if count == 1:
        return np.zeros_like(rewards)
    shifted = rewards - rewards[0]
    above = (count * shifted - shifted.sum(axis=0)) / (count - 1)
    return np.where(_differing(rewards), above, np.zeros_like(rewards))
