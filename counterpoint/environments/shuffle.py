"""The order of one environment's examples: epochs, each shuffled anew by a key, every example as often as its weight says. Pure.

Each position is computed alone, since the order of a million examples would block the event loop for 0.3 s: a Feistel network
permutes the next power of four, and is walked until it returns to the range (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002). Four steps at most on average.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_ROUNDS = 6
"""Rounds of the shuffling network; four suffice for large numbers, and more mix small ones better."""


class EpochOrder:
    """An endless stream of examples. Each epoch is as many draws as there are examples.

    Without weights each epoch has every example once. With them it has example i as often as its share of all weights times the
    number of examples, rounded up or down, and the number over many epochs is exact (systematic sampling, with an offset that is
    drawn for each epoch).
    """

    def __init__(self, size: int, key: str, weights: Sequence[float] | None = None) -> None:
        """`key` seeds the shuffles. Raises `ValueError` for weights that are not one finite number, 0 or more, an example."""
        self._size = size
        self._key = key
        self._ends = None if weights is None else _ends(size, weights)
        """The sums of the weights up to each example, of those of all."""

    def at(self, position: int) -> int:
        """Returns the example at a position of the stream."""
        epoch, within = divmod(position, self._size)
        place = shuffled(within, self._size, f"{self._key}/{epoch}")
        if self._ends is None:
            return place
        point = (place + uniform(f"{self._key}/{epoch}/offset")) / self._size * float(self._ends[-1])
        return int(np.searchsorted(self._ends, min(point, self._last_point), side="right"))

    @property
    def _last_point(self) -> float:
        """The largest number below the sum of all weights: rounding must not lead past the last example."""
        assert self._ends is not None
        return float(np.nextafter(self._ends[-1], 0))


def _ends(size: int, weights: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    values = np.asarray(weights, np.float64)
    if values.shape != (size,):
        raise ValueError(f"there are weights of shape {values.shape} for {size} examples; expected one each")
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        first = int(wrong.argmax())
        raise ValueError(f"the weight of example {first} is {values[first]}; expected a finite number, 0 or more")
    ends = np.cumsum(values)
    if not 0 < ends[-1] < np.inf:
        raise ValueError(f"the weights add up to {ends[-1]}; expected a finite number above 0")
    return ends


def uniform(key: str) -> float:
    """Returns a number from 0 to below 1, always the same for a key."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def shuffled(position: int, size: int, key: str) -> int:
    """Returns the number at `position` of `range(size)`, shuffled by `key`."""
    half = (max(size - 1, 1).bit_length() + 1) // 2
    value = position
    while True:
        left, right = divmod(value, 1 << half)
        for round_number in range(_ROUNDS):
            digest = hashlib.blake2b(f"{key}/{round_number}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & ((1 << half) - 1))
        value = (left << half) + right
        if value < size:
            return value
