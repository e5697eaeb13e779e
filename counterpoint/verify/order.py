"""The order of an environment's examples, computed anew from `docs/environments.md`: shuffled epochs, by a Feistel network."""

from __future__ import annotations

from hashlib import blake2b

_ROUNDS = 6


class Order:
    """The examples of one environment without weights or curriculum."""

    def __init__(self, key: str, size: int) -> None:
        """`key` is the run's seed, a slash and the environment's name."""
        self._key, self._size = key, size
        bits = max(size - 1, 1).bit_length()
        self._half = bits // 2 + bits % 2

    def at(self, position: int) -> int:
        """Returns the example at a position of the stream, from 0."""
        epoch, place = divmod(position, self._size)
        while (place := self._permuted(place, epoch)) >= self._size:
            pass
        return place

    def _permuted(self, place: int, epoch: int) -> int:
        """Returns the image of `place` among the next power of four."""
        mask = (1 << self._half) - 1
        left, right = place >> self._half, place & mask
        for number in range(_ROUNDS):
            text = f"{self._key}/{epoch}/{number}/{right}"
            noise = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
            left, right = right, left ^ (noise & mask)
        return left << self._half | right
