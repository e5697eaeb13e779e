"""A difficulty curriculum: draws examples more often whose pass rate is within a band, neither hopeless nor solved. Pure.

The other draws go through all examples in shuffled epochs (`shuffle.py`), so that unseen, easy and hard ones have their turn and
their pass rates stay known. An example's rate is an exponential moving average over its groups. What is kept of one is two
bytes, its rate and the number of its groups, so that a million examples add two megabytes to a checkpoint. A draw takes some
ten microseconds, however many there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from counterpoint.environments.config import CurriculumConfig
from counterpoint.environments.shuffle import EpochOrder, uniform

MOST_EXAMPLES = 4_000_000
"""Most examples of an environment with a curriculum, since every checkpoint holds two bytes of each."""

_BLOCK = 1024
_ONE = 255
"""A rate of 1 as it is kept."""
_MOST_GROUPS = 255
_ROUNDING = 1e-9
"""The rounding of a reward that is a sum, as a rubric's is: 0.6 + 0.3 + 0.1 is less than 1."""


class Curriculum:
    """The order of one environment's examples by their running pass rates."""

    def __init__(self, config: CurriculumConfig, order: EpochOrder, size: int, key: str) -> None:
        """`key` makes the draws those of one run and environment. Raises `ValueError` for too many examples."""
        if size > MOST_EXAMPLES:
            raise ValueError(
                f"a curriculum takes at most {MOST_EXAMPLES} examples; there are {size}. Select some of them"
            )
        self._config = config
        self._order = order
        self._key = key
        self._drawn = 0
        self._streamed = 0
        """Draws that went through the epochs."""
        self._rates = np.zeros(size, np.uint8)
        self._groups = np.zeros(size, np.uint8)
        """The groups seen of each example."""
        self._index_band()
        self._bands: Counter[str] = Counter()
        """Draws since the metrics were taken, by band."""
        self._passed: list[float] = []
        """Pass rates of the groups since the metrics were taken."""

    def next(self) -> int:
        """Returns the next example."""
        members = int(self._sums.sum())
        share = min(1 - self._config.explore, members / self._config.rest)
        if uniform(f"{self._key}/source/{self._drawn}") < share:
            index = self._member(int(uniform(f"{self._key}/member/{self._drawn}") * members))
        else:
            index = self._order.at(self._streamed)
            self._streamed += 1
        self._drawn += 1
        self._bands[self._band(index)] += 1
        return index

    def observe(self, index: int, rewards: Sequence[float]) -> None:
        """Takes up the rewards of one group of the example."""
        enough = self._config.passes_at - _ROUNDING * max(1.0, abs(self._config.passes_at))
        passed = sum(reward >= enough for reward in rewards) / len(rewards)
        self._passed.append(passed)
        groups, known = int(self._groups[index]), int(self._rates[index]) / _ONE
        # The mean of the first groups, until the newest would weigh less than in the moving average.
        rate = known + max(self._config.smoothing, 1 / (groups + 1)) * (passed - known)
        before = self._band(index) == "band"
        self._rates[index] = round(rate * _ONE)
        self._groups[index] = min(groups + 1, _MOST_GROUPS)
        now = self._band(index) == "band"
        self._members[index] = now
        self._sums[index // _BLOCK] += int(now) - int(before)

    def take_metrics(self) -> dict[str, float]:
        """Returns the share of draws by band, the mean pass rate of groups, and the epochs, since the last call."""
        drawn = self._bands.total()
        metrics = {band: self._bands[band] / drawn for band in ("unseen", "hard", "band", "easy")} if drawn else {}
        if self._passed:
            metrics["pass_rate"] = sum(self._passed) / len(self._passed)
        self._bands, self._passed = Counter(), []
        return metrics | {"epoch": self._streamed / len(self._rates)}

    def state(self) -> dict[str, Any]:
        """Returns the state, for msgpack."""
        return {
            "drawn": self._drawn,
            "streamed": self._streamed,
            "rates": self._rates.tobytes(),
            "groups": self._groups.tobytes(),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises `ValueError` for a state that is not of this many examples."""
        for name in ("rates", "groups"):
            if len(state[name]) != len(self._rates):
                raise ValueError(f"the saved {name} are of {len(state[name])} examples; there are {len(self._rates)}")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state` that was checked."""
        self._drawn, self._streamed = int(state["drawn"]), int(state["streamed"])
        self._rates = np.frombuffer(state["rates"], np.uint8).copy()
        self._groups = np.frombuffer(state["groups"], np.uint8).copy()
        self._index_band()

    def _band(self, index: int) -> str:
        if not self._groups[index]:
            return "unseen"
        rate = self._rates[index]
        return "hard" if rate < self._low else "easy" if rate > self._high else "band"

    def _index_band(self) -> None:
        """Finds the examples of the band, and their number in each block."""
        self._low, self._high = round(self._config.low * _ONE), round(self._config.high * _ONE)
        self._members = (self._groups > 0) & (self._rates >= self._low) & (self._rates <= self._high)
        self._sums = np.add.reduceat(self._members, np.arange(0, len(self._members), _BLOCK), dtype=np.int64)

    def _member(self, rank: int) -> int:
        """Returns the example of the band with `rank` smaller ones in it."""
        ends = np.cumsum(self._sums)
        block = int(np.searchsorted(ends, rank, side="right"))
        within = rank - int(ends[block]) + int(self._sums[block])
        first = block * _BLOCK
        return first + int(np.flatnonzero(self._members[first : first + _BLOCK])[within])
