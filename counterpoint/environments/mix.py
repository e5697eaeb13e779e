"""Chooses the next example when a run mixes several environments by ratio. Pure: no clock, no I/O, a small state.

The environment with the largest deficit is next, so any stretch of the stream has each one's share to within an example or
two. Shares are of what is trained: a group that was drawn in vain (`drawn_in_vain`) does not count, so that another one is drawn
in its place. At most half of an environment's draws are left uncounted, so each environment has at least half of its share of all
draws, however many of another one's are in vain.

Each environment's examples come in epochs, every epoch shuffled anew by seed, name and number alone (`shuffle.py`), or by their
running pass rates (`curriculum.py`). So the state is a few counts an environment, with a curriculum two bytes an example, and a
resumed stream continues exactly: the same rewards in the same order give the same stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from counterpoint.environments.base import Environment
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.curriculum import Curriculum
from counterpoint.environments.shuffle import EpochOrder


class ExamplesChangedError(ValueError):
    """A saved stream is of other examples; the message is for a person."""


class ExampleMix:
    """An endless stream of `(environment name, example index)`, the same for the same seed and environments."""

    def __init__(
        self,
        environments: Sequence[EnvironmentConfig],
        sizes: Mapping[str, int],
        seed: int,
        fingerprints: Mapping[str, str] | None = None,
        weights: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Takes, by environment, the number of examples and, where there is one, their digest and their weights.

        Raises `ValueError` when one has no examples, or too many for its curriculum, or invalid weights.
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
        self._in_vain = dict.fromkeys(self._ratios, 0)
        """How many of those drawn since were in vain."""
        self._orders: dict[str, EpochOrder] = {}
        self._curricula: dict[str, Curriculum] = {}
        for environment in environments:
            name, size = environment.name, self._sizes[environment.name]
            try:
                self._orders[name] = EpochOrder(size, f"{seed}/{name}", (weights or {}).get(name))
                if environment.curriculum is not None:
                    self._curricula[name] = Curriculum(
                        environment.curriculum, self._orders[name], size, f"{seed}/{name}"
                    )
            except ValueError as error:
                raise ValueError(f"environment {name!r}: {error}") from error

    def reweight(self, ratios: Mapping[str, float]) -> None:
        """Draws by other ratios of the same environments from now on. What was drawn before is not made up for."""
        if dict(ratios) != self._ratios:
            self._ratios = {name: ratios[name] for name in self._ratios}
            self._before = dict(self._drawn)
            self._in_vain = dict.fromkeys(self._ratios, 0)

    def next(self) -> tuple[str, int]:
        """Returns the next example: the name of its environment and its index there."""
        counted = {name: self._counted(name) for name in self._ratios}
        total, ratios = sum(counted.values()) + 1, sum(self._ratios.values())
        # The one furthest below its share; the first among equals.
        name = max(self._ratios, key=lambda each: total * self._ratios[each] / ratios - counted[each])
        position = self._drawn[name]
        self._drawn[name] += 1
        curriculum = self._curricula.get(name)
        return name, self._orders[name].at(position) if curriculum is None else curriculum.next()

    def _counted(self, name: str) -> int:
        """Draws of an environment that count towards its share."""
        drawn = self._drawn[name] - self._before[name]
        return drawn - min(self._in_vain[name], drawn // 2)

    def drawn_in_vain(self, environment: str) -> None:
        """A group of the environment that had been drawn will not be trained: it is to be made up for."""
        self._in_vain[environment] += 1

    def observe(self, environment: str, index: int, rewards: Sequence[float]) -> None:
        """Takes up the rewards of one group. Only an environment with a curriculum draws by them."""
        if (curriculum := self._curricula.get(environment)) is not None:
            curriculum.observe(index, rewards)

    def take_metrics(self) -> dict[str, float]:
        """Returns metrics by name: each environment's share and epochs, and what its curriculum did since the last call."""
        ratios = sum(self._ratios.values())
        metrics = {f"examples/{name}/share": ratio / ratios for name, ratio in self._ratios.items()}
        for name, size in self._sizes.items():
            curriculum = self._curricula.get(name)
            own = {"epoch": self._drawn[name] / size} if curriculum is None else curriculum.take_metrics()
            metrics |= {f"examples/{name}/{what}": value for what, value in own.items()}
        return metrics

    def state(self) -> dict[str, Any]:
        """Returns the position in the stream, for msgpack; without a curriculum, of plain types."""
        state = {"seed": self._seed, "drawn": dict(self._drawn), "ratios": dict(self._ratios)}
        return state | {
            "before": dict(self._before),
            "in_vain": dict(self._in_vain),
            "sizes": dict(self._sizes),
            "fingerprints": dict(self._fingerprints),
            "curricula": {name: curriculum.state() for name, curriculum in self._curricula.items()},
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
        curricula = {name: saved for name, saved in state.get("curricula", {}).items() if name in self._curricula}
        for name, saved in curricula.items():
            self._curricula[name].check(saved)
        for name, saved in curricula.items():
            self._curricula[name].restore(saved)
        self._drawn = {name: int(state["drawn"][name]) for name in self._drawn}
        ratios = self._ratios
        self._ratios = {name: float(state.get("ratios", ratios)[name]) for name in ratios}
        self._before = {name: int(state.get("before", {}).get(name, 0)) for name in ratios}
        self._in_vain = {name: int(state.get("in_vain", {}).get(name, 0)) for name in ratios}
        self.reweight(ratios)

    def _check_data(self, state: Mapping[str, Any]) -> None:
        """Raises `ExamplesChangedError` for other examples than those of `state`, which says nothing of them if it is older."""
        for what, now in (("size", self._sizes), ("fingerprint", self._fingerprints)):
            for name, before in state.get(what + "s", {}).items():
                if now.get(name) != before:
                    raise ExamplesChangedError(
                        f"the examples of environment {name!r} have changed since the run was started: their {what} was "
                        f"{before} and is {now.get(name)}; resume with the data of then, or start a new run"
                    )


def mix_of(configs: Sequence[EnvironmentConfig], environments: Mapping[str, Environment], seed: int) -> ExampleMix:
    """Returns the mix of loaded environments, by name. Asks each for its length, and for `fingerprint` and `weights`.

    Raises `ValueError` as `ExampleMix` does.
    """
    sizes = {name: len(environment) for name, environment in environments.items()}
    weights = {
        name: found for name, each in environments.items() if (found := getattr(each, "weights", None)) is not None
    }
    fingerprints: dict[str, str] = {}
    for name, environment in environments.items():
        known = [str(found)] if (found := getattr(environment, "fingerprint", None)) is not None else []
        if name in weights:
            content = np.asarray(weights[name], np.float64).tobytes()
            known.append(f"weights {hashlib.blake2b(content, digest_size=8).hexdigest()}")
        if known:
            fingerprints[name] = ", ".join(known)
    return ExampleMix(configs, sizes, seed, fingerprints, weights)
