"""Draws configurations from a space: every combination of its grids, in Ray's order, with new values for its other domains.

A space is a dict whose values, at any depth in dicts and lists, may be domains (`counterpoint/tune/search/spaces.py`). Domains
are drawn in the order in which they stand; one that asks for a value that is not drawn yet waits for it. Values that were drawn
may contain domains again: these are drawn in the next round. Of several grids the first by name varies fastest: Ray's order,
where that of a sweep (`counterpoint/job/sweep/grid.py`) is the file's, with the last key fastest. Names are Ray's, too, while a
sweep's name directories.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from counterpoint.tune.errors import TuneError
from counterpoint.tune.search.spaces import Categorical, Domain, fits

Path = tuple[str | int, ...]
"""The place of a value in a configuration: keys of dicts and indices of lists."""


def variants(
    space: dict[str, Any], rng: np.random.Generator, constant_grid_search: bool = False
) -> Iterator[tuple[dict[Path, Any], dict[str, Any]]]:
    """Yields each variant: the values that were chosen, by path, and the whole configuration.

    With `constant_grid_search` the values outside the grids are drawn once for all combinations.
    """
    domains, grids = unresolved(space)
    if not domains and not grids:
        yield {}, space
        return
    space = copied(space)
    constant = draw(space, domains, rng) if constant_grid_search else set()
    for combination in _combinations(space, grids):
        drawn = constant | draw(combination, {path: d for path, d in domains.items() if path not in constant}, rng)
        if not drawn and not grids:
            raise TuneError(
                f"the values of {_names(domains)} depend on each other in a circle, so none can be drawn first"
            )
        for inner, config in variants(combination, rng, constant_grid_search):
            yield {path: value_at(config, path) for path in drawn | {*grids} | {*inner}}, config


def unresolved(space: dict[str, Any]) -> tuple[dict[Path, Domain], dict[Path, list[Any]]]:
    """The domains in their order, and the grids by name."""
    domains: dict[Path, Domain] = {}
    grids: dict[Path, list[Any]] = {}
    for path, value in _walk(space, ()):
        if isinstance(value, Domain):
            domains[path] = value
        else:
            grids[path] = value
    return domains, dict(sorted(grids.items(), key=lambda grid: by_name(grid[0])))


def by_name(path: Path) -> list[tuple[bool, Any]]:
    """A key for sorting paths: indices before names, each in their order."""
    return [(isinstance(part, str), part) for part in path]


def draw(config: dict[str, Any], domains: dict[Path, Domain], rng: np.random.Generator) -> set[Path]:
    """Puts values in the place of the domains; of those that wait for others, as many as can be drawn now. Returns which."""
    drawn: set[Path] = set()
    progress = True
    while progress:
        progress = False
        for path, domain in domains.items():
            if path in drawn:
                continue
            try:
                value = domain.sample(rng, _Spec(config))
            except _NotDrawnError:
                continue
            except Exception as error:
                raise TuneError(
                    f"config/{flat_name(path)}: {domain} failed: {type(error).__name__}: {error}"
                ) from error
            _assign(config, path, copied(value))
            drawn.add(path)
            progress = True
    return drawn


def count_variants(space: dict[str, Any], num_samples: int, points: list[dict[str, Any]]) -> int:
    """How many trials a space gives: each point replaces a sample. Grids inside of choices are not counted."""
    return sum(_grid_size(with_point(space, point)) for point in points) + max(
        0, num_samples - len(points)
    ) * _grid_size(space)


def with_point(space: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    """A copy of the space in which the point's values stand instead of domains, as their domain has them (1 for 1.0 of integers).

    Keys may be nested or flat (`net/width`). A number outside its domain is warned of. Raises `TuneError` for any other value
    that its domain has not, and for a key at which nothing is searched, unless the space has the same value there.
    """
    if not isinstance(point, dict):
        raise TuneError(f"points_to_evaluate: {point!r} is a {type(point).__name__}; expected a list of configurations")
    space = copied(space)
    _fill(space, point, "points_to_evaluate")
    return space


def _fill(space: Any, point: Any, where: str) -> None:
    for key, value in _children(point).items():
        inside, name = _children(space), f"{where}/{key}"
        if key not in inside:
            ends = [index for index, letter in enumerate(str(key)) if letter == "/" and key[:index] in inside]
            if not ends:
                raise TuneError(f"{name}: the space has no such key; it has {', '.join(map(str, inside))}")
            _fill(space, {key[: ends[0]]: {key[ends[0] + 1 :]: value}}, where)
            continue
        there = inside[key]
        domain = Categorical(there["grid_search"]) if is_grid(there) else there
        if isinstance(domain, Domain):
            space[int(key) if isinstance(space, list) else key] = domain.taken(copied(value), name)
        elif isinstance(there, dict | list) and isinstance(value, dict | list | tuple):
            _fill(there, value, name)
        elif not fits(there, value):
            raise TuneError(f"{name}: {value!r} is not {there!r}, which the space has there; nothing is searched")


def _children(value: Any) -> dict[Any, Any]:
    """Returns what stands in a table or, by position, in a list; nothing of anything else."""
    if isinstance(value, list | tuple):
        return {str(position): each for position, each in enumerate(value)}
    return value if isinstance(value, dict) else {}


def flat_name(path: Path) -> str:
    """The path as `evaluated_params` names it."""
    return "/".join(map(str, path))


def format_vars(values: dict[Path, Any]) -> str:
    """The chosen values in one word, for file names: `lr=0.0010,width=64`, sorted by path."""
    return ",".join(f"{_clean(path[-1])}={_clean(values[path])}" for path in sorted(values, key=by_name))


def leaves(config: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value of a configuration that is no dict, by path."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, config


def is_grid(value: Any) -> bool:
    """Whether it is what `grid_search` returns."""
    return isinstance(value, dict) and value.keys() == {"grid_search"}


def copied(value: Any) -> Any:
    """A copy of the dicts and lists; tuples become lists, since they do so in JSON."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    return value


def value_at(config: Any, path: Path) -> Any:
    """What stands at a path."""
    for part in path:
        config = config[part]
    return config


class _NotDrawnError(Exception):
    """A function asked for a value that is not drawn yet."""


class _Spec:
    """A configuration as a function of `sample_from` sees it: by key or attribute; `spec.config` is the configuration."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def __getitem__(self, key: str) -> Any:
        value = self._config[key]
        if isinstance(value, Domain) or is_grid(value):
            raise _NotDrawnError
        if isinstance(value, list) and next(_walk(value, ()), None) is not None:
            raise _NotDrawnError
        return _Spec(value) if isinstance(value, dict) else value

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        if key == "config" and "config" not in self._config:
            return self
        try:
            return self[key]
        except KeyError:
            raise AttributeError(
                f"the configuration has no {key!r}; it has {', '.join(map(str, self._config))}"
            ) from None

    def __contains__(self, key: str) -> bool:
        return key in self._config

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of the key, or `default`, as a dict does."""
        return self[key] if key in self._config else default


def _combinations(space: dict[str, Any], grids: dict[Path, list[Any]]) -> Iterator[dict[str, Any]]:
    fastest_last = dict(reversed(grids.items()))
    for values in itertools.product(*fastest_last.values()):
        config = copied(space)
        for path, value in zip(fastest_last, values, strict=True):
            _assign(config, path, copied(value))
        yield config


def _walk(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Every domain, and the values of every grid, by path."""
    if isinstance(value, Domain):
        yield path, value
    elif is_grid(value):
        values = value["grid_search"]
        if not isinstance(values, list | tuple) or not values:
            raise TuneError(
                f"config/{flat_name(path)}: grid_search({values!r}) has no value; give it a list of at least one"
            )
        yield path, list(values)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, index))


def _grid_size(space: dict[str, Any]) -> int:
    return math.prod(len(values) for values in unresolved(space)[1].values())


def _assign(config: dict[str, Any], path: Path, value: Any) -> None:
    value_at(config, path[:-1])[path[-1]] = value


def _names(domains: dict[Path, Domain]) -> str:
    return ", ".join(flat_name(path) for path in domains)


def _clean(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return re.sub(r"[^a-zA-Z0-9_-]+", "_", str(value)).strip("_")
