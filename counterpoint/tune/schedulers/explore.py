"""How population based training changes a configuration that a trial takes over: it resamples or perturbs values.

As Ray Tune does, but that a value stays in its domain: one of a choice moves to a neighbour as in a list, a number stays within
the bounds, and what is whole, or a multiple of `q`, moves by at least one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from counterpoint.tune.errors import TuneError
from counterpoint.tune.search.spaces import Categorical, Domain, Float, Function, Integer, is_number
from counterpoint.tune.search.variants import copied, is_grid, unresolved, variants

Mutations = dict[str, Any]
"""What PBT changes, by key of the configuration: a list, a domain, a function without arguments, or a dict of the same
for nested keys."""


def check_mutations(mutations: Mutations, where: str = "hyperparam_mutations") -> None:
    """Refuses what `explore` cannot draw from."""
    for key, values in mutations.items():
        name = f"{where}/{key}"
        if is_grid(values):
            raise TuneError(f"{name}: a grid is gone through, not drawn from; give the list itself")
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


def completed(
    config: dict[str, Any], mutations: Mutations, generator: random.Random, where: str = "config"
) -> Mutations:
    """What is drawn for the keys that a configuration lacks: of a nested one that it has, the whole table with what is new.

    Raises `TuneError` where a table of mutations meets a value.
    """
    drawn: dict[str, Any] = {}
    for key, values in mutations.items():
        if not isinstance(values, dict):
            if key not in config:
                drawn[key] = _resampled(values, generator)
            continue
        if not isinstance(inner := config.get(key, {}), dict):
            raise TuneError(f"{where}/{key} is {inner!r}, where hyperparam_mutations has a table: {values}")
        if (new := completed(inner, values, generator, f"{where}/{key}")) or key not in config:
            drawn[key] = inner | new
    return drawn


def explore(
    config: dict[str, Any],
    mutations: Mutations,
    resample_probability: float,
    factors: Sequence[float],
    generator: random.Random,
) -> dict[str, Any]:
    """A copy of the configuration in which each key of the mutations has changed.

    With the given probability a key is drawn anew. Else a value of a list or of a choice moves to a neighbour, and a number is
    multiplied by one of the factors, within its domain; what is neither is drawn anew. Whole numbers stay whole, and booleans
    stay booleans.
    """
    changed = cast(dict[str, Any], copied(config))
    for key, values in mutations.items():
        if key not in config:
            raise TuneError(f"the configuration has no {key!r}, which hyperparam_mutations changes; it has {[*config]}")
        value = config[key]
        values = of_whole_numbers(values, value)
        if isinstance(values, dict):
            changed[key] = explore(value, values, resample_probability, factors, generator)
        elif isinstance(values, list | tuple | Categorical):
            choices = values if isinstance(values, Categorical) else Categorical(values)
            changed[key] = _neighbour(value, choices, resample_probability, generator)
        elif generator.random() < resample_probability:
            changed[key] = _resampled(values, generator, value)
        else:
            changed[key] = _perturbed(value, values, generator.choice(factors), generator)
    return changed


def of_whole_numbers(values: Any, value: Any) -> Any:
    """The whole numbers of a domain of real ones that has the value, where the value is whole; else the domain as it is."""
    if type(value) is not int or not isinstance(values, Float) or values.q is not None or not values.is_valid(value):
        return values
    if values.distribution == "normal":
        return values
    return Integer(math.ceil(values.lower), math.floor(values.upper) + 1, values.distribution)


def _neighbour(value: Any, choices: Categorical, resample_probability: float, generator: random.Random) -> Any:
    if generator.random() < resample_probability or (index := choices.index(value)) is None:
        return _drawn(generator.choice(choices.categories), generator)
    neighbour = min(max(index + generator.choice([-1, 1]), 0), len(choices.categories) - 1)
    return value if neighbour == index else _drawn(choices.categories[neighbour], generator)


def _perturbed(value: Any, values: Domain | Callable[[], Any], factor: float, generator: random.Random) -> Any:
    """The number times the factor. Of a function no bounds are known, but 1 does not become 0."""
    if is_number(value) and isinstance(values, Float | Integer):
        return _within(values, value, factor)
    if isinstance(value, bool) and not isinstance(values, Domain):
        return value
    if not is_number(value):
        return _resampled(values, generator, value)
    return value * factor if isinstance(value, float) else value and (_moved(value, factor) or value)


def _within(domain: Float | Integer, value: float, factor: float) -> float:
    """The nearest to the value times the factor that the domain may draw; of one with steps, another step than before."""
    if isinstance(domain, Integer):
        changed: float = _moved(value / (domain.q or 1), factor) * (domain.q or 1)
    else:
        changed = value * factor if domain.q is None else domain.rounded(_moved(value / domain.q, factor) * domain.q)
    least, greatest = domain.ends
    return min(max(changed, least), greatest)


def _moved(value: float, factor: float) -> int:
    """The value times the factor as a whole number, at least 1 away from the value unless the factor is 1."""
    before, after = round(value), round(value * factor)
    if after != before or factor == 1:
        return after
    return before + (1 if (factor > 1) == (value >= 0) else -1)


def _resampled(values: Any, generator: random.Random, former: Any = None) -> Any:
    """A new value. That of a function is whole, or a boolean, where the former is."""
    if isinstance(values, list | tuple):
        return _drawn(generator.choice(values), generator)
    if isinstance(values, Domain):
        return _drawn(values, generator)
    value = _drawn(values(), generator)
    if isinstance(former, bool):
        return bool(value)
    return round(value) if isinstance(former, int) and is_number(value) else value


def _drawn(space: Any, generator: random.Random) -> Any:
    """The value, with values in the place of domains in it."""
    if unresolved({"value": space}) == ({}, {}):
        return space
    return next(variants({"value": space}, np.random.default_rng(generator.getrandbits(64))))[1]["value"]
