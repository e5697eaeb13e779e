"""The order of an environment's examples, computed anew from `docs/receipts.md`: shuffled epochs, by a Feistel network."""

from __future__ import annotations

from hashlib import blake2b

_ROUNDS = 6


def example_at(position: int, size: int, key: str) -> int:
    """Returns the example at a position of the stream, from 0. `key` is the run's seed, a slash and the environment's name."""
    epoch, place = divmod(position, size)
    bits = max(size - 1, 1).bit_length()
    half = bits // 2 + bits % 2
    while True:
        left, right = divmod(place, 1 << half)
        for number in range(_ROUNDS):
            text = f"{key}/{epoch}/{number}/{right}"
            noise = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
            left, right = right, left ^ (noise & ((1 << half) - 1))
        place = (left << half) + right
        if place < size:
            return place
