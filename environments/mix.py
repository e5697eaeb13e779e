"""Which example comes next, when a run mixes several environments by ratio. Pure: no clock, no I/O, all its state a small value.

Environments take turns by largest deficit, so any stretch of the stream holds each one's share to within an example or two.
Each environment's examples come in epochs, every epoch shuffled anew by seed, name and number alone. So the state is one
count an environment, and resuming from it gives exactly what would have come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from environments.config import EnvironmentConfig

_ROUNDS = 6
"""Of the network that shuffles; four suffice for large numbers, and more mix small ones better."""


class ExampleMix:
    """An endless stream of `(environment name, example index)`, the same for the same seed and environments."""

    def __init__(self, environments: Sequence[EnvironmentConfig], sizes: Mapping[str, int], seed: int) -> None:
        """`sizes` is the number of examples of each environment, by name. Raises `ValueError` when one has none."""
        self._ratios = {environment.name: environment.ratio for environment in environments}
        self._sizes = {name: sizes[name] for name in self._ratios}
        for name, size in self._sizes.items():
            if size < 1:
                raise ValueError(f"environment {name!r} has {size} examples, expected at least 1")
        self._seed = seed
        self._drawn = dict.fromkeys(self._ratios, 0)

    def next(self) -> tuple[str, int]:
        """The next example: the name of its environment and its index there."""
        total, ratios = sum(self._drawn.values()) + 1, sum(self._ratios.values())
        name = max(  # the one that lags most behind its share; the first of equals
            self._ratios, key=lambda each: total * self._ratios[each] / ratios - self._drawn[each]
        )
        epoch, position = divmod(self._drawn[name], self._sizes[name])
        self._drawn[name] += 1
        return name, _shuffled(position, self._sizes[name], f"{self._seed}/{name}/{epoch}")

    def state(self) -> dict[str, Any]:
        """Where the stream is, of plain types: JSON and msgpack carry it."""
        return {"seed": self._seed, "drawn": dict(self._drawn)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`. Raises `ValueError`, changing nothing, when it is of another seed or other environments."""
        if state["seed"] != self._seed or set(state["drawn"]) != set(self._drawn):
            raise ValueError(
                f"the saved example stream is of seed {state['seed']} and environments {sorted(state['drawn'])}, this run is of "
                f"seed {self._seed} and {sorted(self._drawn)}: resume with the configuration the run was started with"
            )
        self._drawn = {name: int(state["drawn"][name]) for name in self._drawn}


def _shuffled(position: int, size: int, key: str) -> int:
    """What stands at `position` of `range(size)`, shuffled as `key` says.

    Computed alone, since laying out the order of a million examples would hold the event loop for 0.3 s: a Feistel network
    permutes the next power of four, and is walked until it comes back into the range (Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002). Four steps at most on average.
    """
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
