"""The default search algorithm: every combination of the grids, and random values for the rest. As Ray's of the same name.

It draws from a generator of its own, and its state is that generator's at the beginning of a sample plus a position within the
sample's variants; so a restored one proposes exactly what the original would have.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from counterpoint.tune.errors import TuneError
from counterpoint.tune.experiment import Experiment
from counterpoint.tune.json_values import as_json
from counterpoint.tune.result import Result
from counterpoint.tune.search.search_alg import SearchAlg
from counterpoint.tune.search.space_check import check_same_space, describe
from counterpoint.tune.search.variants import Path, copied, count_variants, flat_name, format_vars, variants, with_point
from counterpoint.tune.trial import Trial


class BasicVariantGenerator(SearchAlg):
    """Proposes each experiment's variants, one experiment after the other.

    Args:
        points_to_evaluate: Configurations, or parts of such, that are tried first; each replaces one of `num_samples`. They are
            read as those of `OptunaSearch`.
        max_concurrent: So many of its trials may be unfinished at a time; 0 for any number.
        constant_grid_search: Draws the random values once for all combinations of the grids.
        random_state: A seed, or a generator of numpy (`default_rng`); None for a new seed, which the state keeps.
    """

    max_pending_trials = 16

    def __init__(
        self,
        points_to_evaluate: Sequence[dict[str, Any]] | None = None,
        max_concurrent: int = 0,
        constant_grid_search: bool = False,
        random_state: int | np.random.Generator | None = None,
    ) -> None:
        self.max_concurrent = max_concurrent
        self._points = copied(list(points_to_evaluate or []))
        self._constant_grid_search = constant_grid_search
        self._rng = _generator(random_state)
        self._experiments: list[Experiment] = []
        self._spaces: list[dict[str, str]] = []
        self._total_samples = 0
        self._prefix = secrets.token_hex(3)[:5]
        self._live: set[str] = set()
        self._created = 0
        self._experiment = 0  # which one is drawn from
        self._sample = 0  # which of its points and samples
        self._variant = 0  # how many of the sample's variants are proposed
        self._open: Iterator[tuple[dict[Path, Any], dict[str, Any]]] | None = None  # the sample's variants
        self._rng_before = _rng_state(self._rng)  # before the sample

    @property
    def total_samples(self) -> int:
        """How many trials it will propose in all; 0 if without end."""
        return self._total_samples

    def add_configurations(self, experiments: Sequence[Experiment]) -> None:
        """Appends experiments."""
        for experiment in experiments:
            self._experiments.append(experiment)
            self._spaces.append(describe(experiment.config))
            total = count_variants(experiment.config, max(experiment.num_samples, 0), self._points)
            self._total_samples += total if experiment.num_samples >= 0 else 0

    def next_trial(self) -> Trial | None:
        """The next variant; None at the limit of `max_concurrent` and at the end."""
        if self.max_concurrent and len(self._live) >= self.max_concurrent:
            return None
        while not self.is_finished():
            if self._open is None and not self._open_sample():
                self._experiment, self._sample = self._experiment + 1, 0
            elif self._open is not None and (variant := next(self._open, None)) is not None:
                self._variant += 1
                return self._trial(*variant)
            elif self._open is not None:
                self._open, self._variant, self._sample = None, 0, self._sample + 1
        return None

    def is_finished(self) -> bool:
        """Whether every experiment is exhausted."""
        return self._experiment >= len(self._experiments)

    def on_trial_complete(self, trial_id: str, result: Result | None = None, error: bool = False) -> None:
        """Makes room for another below `max_concurrent`."""
        self._live.discard(trial_id)

    def state(self) -> dict[str, Any]:
        """Its position, and the generator's state before the current sample."""
        return {
            "prefix": self._prefix,
            "created": self._created,
            "live": sorted(self._live),
            "position": [self._experiment, self._sample, self._variant],
            "rng": self._rng_before if self._open is not None else _rng_state(self._rng),
            "spaces": self._spaces,
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Goes to the position. The experiments must have been added, with the spaces that they had."""
        for experiment, space in zip(self._experiments, state["spaces"], strict=False):
            check_same_space(experiment.config, space)
        self._prefix, self._created, self._live = state["prefix"], state["created"], set(state["live"])
        self._experiment, self._sample, self._variant = state["position"]
        self._rng = _restored(state["rng"])
        self._open = None
        if self._variant and self._open_sample():
            for _ in range(self._variant):
                next(self._open or iter(()))

    def _open_sample(self) -> bool:
        """Begins with the variants of the current sample; False if the experiment has no such."""
        experiment = self._experiments[self._experiment]
        space = experiment.config
        if self._sample < len(self._points):
            space = with_point(space, self._points[self._sample])
        elif 0 <= experiment.num_samples <= self._sample:
            return False
        self._rng_before = _rng_state(self._rng)
        self._open = variants(space, self._rng, self._constant_grid_search)
        return True

    def _trial(self, chosen: dict[Path, Any], config: dict[str, Any]) -> Trial:
        trial_id = f"{self._prefix}_{self._created:05d}"
        tag = str(self._created) + (f"_{format_vars(chosen)}" if chosen else "")
        params = {flat_name(path): value for path, value in chosen.items()}
        trial = self._experiments[self._experiment].make_trial(trial_id, as_json(config), as_json(params), tag)
        self._created += 1
        if self.max_concurrent:
            self._live.add(trial_id)
        return trial


def _generator(random_state: int | np.random.Generator | None) -> np.random.Generator:
    if random_state is None:
        return np.random.default_rng(secrets.randbits(64))
    rng = np.random.default_rng(random_state)
    if not isinstance(rng.bit_generator, np.random.PCG64):
        raise TuneError(
            f"random_state uses {type(rng.bit_generator).__name__}, whose state is not saved; pass a seed, or "
            "numpy.random.default_rng(seed)"
        )
    return rng


def _rng_state(rng: np.random.Generator) -> dict[str, Any]:
    """The generator's state; 128-bit numbers as text, since JSON readers keep 64 bits."""
    state = rng.bit_generator.state
    numbers = state["state"]
    return {
        "state": hex(numbers["state"]),
        "inc": hex(numbers["inc"]),
        "has_uint32": state["has_uint32"],
        "uinteger": state["uinteger"],
    }


def _restored(state: dict[str, Any]) -> np.random.Generator:
    bits = np.random.PCG64()
    bits.state = {
        "bit_generator": "PCG64",
        "state": {"state": int(state["state"], 16), "inc": int(state["inc"], 16)},
        "has_uint32": state["has_uint32"],
        "uinteger": state["uinteger"],
    }
    return np.random.Generator(bits)
