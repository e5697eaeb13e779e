"""Makes a curve of many points one of few that hides no peak: the mean, the least and the greatest of each stretch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """Stretches of a curve, each of at least one point, ascending."""

    x: Floats
    """The mean of the stretch's places."""
    mean: Floats
    """NaN, like the others, where no point of the stretch has a value."""
    low: Floats
    high: Floats
    exact: bool
    """Whether each stretch is one point."""


def downsample(x: npt.NDArray[np.int64] | Floats, y: Floats, points: int) -> Curve:
    """Returns at most `points` stretches of the curve. `x` is ascending; a `y` that is NaN is no value."""
    x = x.astype(np.float64)
    if len(x) <= points:
        return Curve(x, y, y, y, exact=True)
    first, last = float(x[0]), float(x[-1])
    if last <= first:  # all at one place
        starts = np.zeros(1, dtype=np.int64)
    else:
        stretches = np.minimum(((x - first) / (last - first) * points).astype(np.int64), points - 1)
        starts = np.flatnonzero(np.append(True, stretches[1:] != stretches[:-1]))
    counts = np.diff(np.append(starts, len(x)))
    known = np.isfinite(y)
    counts_known = np.add.reduceat(known.astype(np.float64), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(known, y, 0.0), starts) / counts_known
    low, high = (
        np.minimum.reduceat(np.where(known, y, np.inf), starts),
        np.maximum.reduceat(np.where(known, y, -np.inf), starts),
    )
    for each in (low, high):
        each[counts_known == 0] = np.nan
    return Curve(np.add.reduceat(x, starts) / counts, np.clip(mean, low, high), low, high, exact=False)


def rounded(values: Floats) -> list[float | None]:
    """Returns the values to seven digits for JSON, None for NaN: a column has no more, and more would be longer to send."""
    with np.errstate(divide="ignore", invalid="ignore"):
        magnitude = np.floor(np.log10(np.abs(values)))
    factor = 10.0 ** (6 - np.where(np.isfinite(magnitude), magnitude, 0.0))
    return [value if value == value else None for value in (np.round(values * factor) / factor).tolist()]
