"""How population based training changes a configuration that a trial takes over: it resamples or perturbs values."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from counterpoint.tune.errors import TuneError
from counterpoint.tune.search.spaces import Domain, Function
from counterpoint.tune.search.variants import copied

Mutations = dict[str, Any]
"""What PBT changes, by key of the configuration: a list, a domain, a function without arguments, or a dict of the same
for nested keys."""


def check_mutations(mutations: Mutations, where: str = "hyperparam_mutations") -> None:
    """Refuses what `explore` cannot draw from."""
    for key, values in mutations.items():
        name = f"{where}/{key}"
        if isinstance(values, dict):
            check_mutations(values, name)
        elif isinstance(values, Function):
            raise TuneError(f"{name}: sample_from is not supported; expected a domain such as uniform, or a function")
        elif isinstance(values, list | tuple):
            if not values:
                raise TuneError(f"{name}: an empty list has no value; give it at least one")
        elif not isinstance(values, Domain) and not callable(values):
            raise TuneError(
                f"{name}: {values!r} is a {type(values).__name__}; expected a list, a dict, a domain or a function"
            )


def draw(values: Any, generator: random.Random) -> Any:
    """A value for a key that a configuration lacks."""
    if isinstance(values, dict):
        return {key: draw(inner, generator) for key, inner in values.items()}
    if isinstance(values, list | tuple):
        return generator.choice(values)
    return _resampled(values, generator)


def explore(
    config: dict[str, Any],
    mutations: Mutations,
    resample_probability: float,
    factors: Sequence[float],
    generator: random.Random,
) -> dict[str, Any]:
    """A copy of the configuration in which each key of the mutations has changed.

    With the given probability a key is drawn anew. Else a value of a list moves to a neighbour, and a number is multiplied by one
    of the factors; whole numbers stay whole, and booleans stay booleans.
    """
    changed = cast(dict[str, Any], copied(config))
    for key, values in mutations.items():
        if key not in config:
            raise TuneError(f"the configuration has no {key!r}, which hyperparam_mutations changes; it has {[*config]}")
        if isinstance(values, dict):
            changed[key] = explore(config[key], values, resample_probability, factors, generator)
        elif isinstance(values, list | tuple):
            changed[key] = _neighbour(config[key], values, resample_probability, generator)
        else:
            changed[key] = _perturbed(config[key], values, resample_probability, factors, generator)
    return changed


def _neighbour(value: Any, values: Sequence[Any], resample_probability: float, generator: random.Random) -> Any:
    if generator.random() < resample_probability or value not in values:
        return generator.choice(values)
    index = values.index(value) + generator.choice([-1, 1])
    return values[min(max(index, 0), len(values) - 1)]


def _perturbed(
    value: Any,
    values: Domain | Callable[[], Any],
    resample_probability: float,
    factors: Sequence[float],
    generator: random.Random,
) -> Any:
    if generator.random() < resample_probability:
        changed = _resampled(values, generator)
    else:
        factor = generator.choice(factors)
        if not isinstance(value, int | float):
            raise TuneError(f"{value!r} cannot be multiplied by {factor}; give its values as a list, not a domain")
        changed = value * factor
    if isinstance(value, bool):
        return bool(changed)
    return round(changed) if isinstance(value, int) else changed


def _resampled(values: Domain | Callable[[], Any], generator: random.Random) -> Any:
    if isinstance(values, Domain):
        return values.sample(np.random.default_rng(generator.getrandbits(64)))
    return values()
