"""Chooses the next example when a run mixes several environments by ratio. Pure: no clock, no I/O, a small state.

The environment with the largest deficit is next, so any stretch of the stream has each one's share to within an example or
two. Each environment's examples come in epochs, every epoch shuffled anew by seed, name and number alone. So the state is
a few counts an environment, and a resumed stream continues exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from environments.base import Environment
from environments.config import EnvironmentConfig

_ROUNDS = 6
"""Rounds of the shuffling network; four suffice for large numbers, and more mix small ones better."""


class ExampleMix:
    """An endless stream of `(environment name, example index)`, the same for the same seed and environments."""

    def __init__(
        self,
        environments: Sequence[EnvironmentConfig],
        sizes: Mapping[str, int],
        seed: int,
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        """`sizes` is the number of examples of each environment, by name; `fingerprints` their digest, where there is one.

        Raises `ValueError` when one has no examples.
        """
        self._ratios = {environment.name: environment.ratio for environment in environments}
        self._sizes = {name: sizes[name] for name in self._ratios}
        for name, size in self._sizes.items():
            if size < 1:
                raise ValueError(f"environment {name!r} has {size} examples, expected at least 1")
        self._fingerprints = dict(fingerprints or {})
        self._seed = seed
        self._drawn = dict.fromkeys(self._ratios, 0)
        self._before = dict.fromkeys(self._ratios, 0)
        """Examples drawn before the ratios were those of now; shares count from there on."""

    def reweight(self, ratios: Mapping[str, float]) -> None:
        """Draws by other ratios of the same environments from now on. What was drawn before is not made up for."""
        if dict(ratios) != self._ratios:
            self._ratios = {name: ratios[name] for name in self._ratios}
            self._before = dict(self._drawn)

    def next(self) -> tuple[str, int]:
        """Returns the next example: the name of its environment and its index there."""
        drawn = {name: self._drawn[name] - self._before[name] for name in self._ratios}
        total, ratios = sum(drawn.values()) + 1, sum(self._ratios.values())
        name = max(  # the one furthest below its share; the first among equals
            self._ratios, key=lambda each: total * self._ratios[each] / ratios - drawn[each]
        )
        epoch, position = divmod(self._drawn[name], self._sizes[name])
        self._drawn[name] += 1
        return name, shuffled(position, self._sizes[name], f"{self._seed}/{name}/{epoch}")

    def state(self) -> dict[str, Any]:
        """Returns the position in the stream, of plain types, for JSON and msgpack."""
        state = {"seed": self._seed, "drawn": dict(self._drawn), "ratios": dict(self._ratios)}
        return state | {
            "before": dict(self._before),
            "sizes": dict(self._sizes),
            "fingerprints": dict(self._fingerprints),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`; where it has other ratios, as `reweight` would.

        Raises `ValueError`, changing nothing, for another seed, other environments or other examples.
        """
        if state["seed"] != self._seed or set(state["drawn"]) != set(self._drawn):
            raise ValueError(
                f"the saved example stream is of seed {state['seed']} and environments {sorted(state['drawn'])}, this run is of "
                f"seed {self._seed} and {sorted(self._drawn)}: resume with the configuration the run was started with"
            )
        self._check_data(state)
        self._drawn = {name: int(state["drawn"][name]) for name in self._drawn}
        ratios = self._ratios
        self._ratios = {name: float(state.get("ratios", ratios)[name]) for name in ratios}
        self._before = {name: int(state.get("before", {}).get(name, 0)) for name in ratios}
        self.reweight(ratios)

    def _check_data(self, state: Mapping[str, Any]) -> None:
        """Raises `ValueError` for other examples than those of `state`, which says nothing of them if it is older."""
        for what, now in (("size", self._sizes), ("fingerprint", self._fingerprints)):
            for name, before in state.get(what + "s", {}).items():
                if now.get(name) != before:
                    raise ValueError(
                        f"the examples of environment {name!r} have changed since the run was started: their {what} was "
                        f"{before} and is {now.get(name)}; resume with the data of then, or start a new run"
                    )


def mix_of(configs: Sequence[EnvironmentConfig], environments: Mapping[str, Environment], seed: int) -> ExampleMix:
    """Returns the mix of loaded environments, by name. Asks each for its length, and its `fingerprint` if it has one."""
    fingerprints = {name: getattr(each, "fingerprint", None) for name, each in environments.items()}
    known = {name: str(value) for name, value in fingerprints.items() if value is not None}
    return ExampleMix(configs, {name: len(each) for name, each in environments.items()}, seed, known)


def shuffled(position: int, size: int, key: str) -> int:
    """Returns the number at `position` of `range(size)`, shuffled by `key`.

    It is computed alone, since the order of a million examples would block the event loop for 0.3 s: a Feistel network
    permutes the next power of four, and is walked until it returns to the range (Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002). Four steps at most on average.
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
