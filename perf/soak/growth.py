"""How much each measure of a soak grows per 1,000 steps after the first tenth, and whether that is flat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

FLAT = {
    "resident MB": 0.5,
    "heap used MB": 0.5,
    "blocks": 1000.0,
    "descriptors": 0.5,
    "threads": 0.5,
    "processes": 0.1,
    "files": 2.0,
}
"""The growth of each measure per 1,000 steps up to which it counts as flat. A measure that is not here grows by design,
or, as "heap free MB", is a part of another."""

Sample = Mapping[str, Any]
"""`step`, and `held`: a list of process, measure and value."""


@dataclass(frozen=True, slots=True)
class Growth:
    """One measure of one process."""

    process: str
    measure: str
    first: float
    """Its value at the end of the first tenth: the median of the tenth after it."""
    last: float
    """The median of the last tenth."""
    per_1000: float
    """The slope by least squares after the first tenth."""

    @property
    def is_flat(self) -> bool:
        """Whether it grows by no more than `FLAT`."""
        return self.per_1000 <= FLAT.get(self.measure, np.inf)


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Returns the growth of each measure that was there from the end of the first tenth to the last sample, by name."""
    if not samples:
        return []
    steps, begin = samples[-1]["step"], samples[0]["step"]
    settled = [sample for sample in samples if sample["step"] >= begin + (steps - begin) / 10]
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for sample in settled:
        for process, measure, value in sample["held"]:
            series.setdefault((process, measure), []).append((sample["step"], value))
    return [
        _growth(*key, np.array(points))
        for key, points in sorted(series.items())
        if len(points) > 10 and points[-1][0] == steps
    ]


def _growth(process: str, measure: str, points: np.ndarray[Any, np.dtype[np.float64]]) -> Growth:
    """`points` is `[samples, 2]`: step and value."""
    tenth = max(1, len(points) // 9)
    moved = np.ptp(points[:, 0]) > 0
    slope = float(np.polyfit(points[:, 0] / 1000, points[:, 1], 1)[0]) if moved else 0.0
    return Growth(process, measure, float(np.median(points[:tenth, 1])), float(np.median(points[-tenth:, 1])), slope)
