"""Search spaces: what a value of a configuration may be before it is drawn. Names and meanings are those of Ray Tune.

A space lives only in the process that searches. A configuration may nest domains in dicts and lists, and a value that is drawn
may itself contain domains (a conditional space). `counterpoint/tune/search/variants.py` draws configurations from it; what is
drawn must be JSON. With the same seed the same calls draw the same values as `ray.tune`, bit for bit.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from numbers import Real
from typing import Any, Literal

import numpy as np

from counterpoint.tune.errors import TuneError

logger = logging.getLogger(__name__)

Distribution = Literal["uniform", "loguniform", "normal"]


class Domain:
    """Values of which one is drawn. The base is for `isinstance`."""

    def sample(self, rng: np.random.Generator, spec: Any = None) -> Any:
        """Draws a value; `spec` is the configuration as far as it is drawn (see `sample_from`)."""
        raise NotImplementedError

    def is_valid(self, value: Any) -> bool:
        """Whether the domain contains the value."""
        raise NotImplementedError

    def taken(self, value: Any, where: str) -> Any:
        """A value that a user gives, as the domain has it. Raises `TuneError` with `where` for one that it cannot have."""
        return value


@dataclass(frozen=True)
class _Numbers(Domain):
    lower: float
    upper: float
    distribution: Distribution = "uniform"
    q: float | None = None

    def taken(self, value: Any, where: str) -> Any:
        """A number, also outside the domain, with a warning. A logarithm needs one above 0, an integer a multiple of `q`."""
        step = (self.q or 1) if isinstance(self, Integer) else None
        is_possible = is_number(value) and abs(value) <= sys.float_info.max
        is_possible = is_possible and (value > 0 or self.distribution != "loguniform")
        if not is_possible or (step is not None and value % step != 0):
            raise TuneError(f"{where}: {value!r} is not in {self}")
        if not self.is_valid(value):
            logger.warning("%s: %r is not in %s; it is tried all the same", where, value, self)
        return float(value) if step is None else int(value)


@dataclass(frozen=True)
class Float(_Numbers):
    """Real numbers, both bounds included where `q` rounds them; `lower` and `upper` are the mean and deviation of a normal."""

    def __post_init__(self) -> None:
        _check_bounds(self)
        if self.q is not None and self.distribution != "normal":
            for bound in (self.lower, self.upper):
                if not math.isclose(bound / self.q, round(bound / self.q)):
                    raise TuneError(
                        f"{self}: the bound {bound} is no multiple of q={self.q}; values are multiples of q"
                    )

    def sample(self, rng: np.random.Generator, spec: Any = None) -> float:
        """Draws a value."""
        if self.distribution == "normal":
            value = rng.normal(self.lower, self.upper, size=1)[0]
        else:
            lower, upper = self.lower, self.upper
            if self.q is not None:
                lower, upper = round(lower / self.q) * self.q, round(upper / self.q) * self.q
            value = _between(rng, lower, upper, self.distribution)
        return float(value if self.q is None else self.rounded(value))

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest value that is drawn."""
        if self.distribution == "normal":
            return -math.inf, math.inf
        if self.q is None:
            return float(self.lower), math.nextafter(self.upper, self.lower)
        return self.rounded(self.lower), self.rounded(self.upper)

    def rounded(self, value: float) -> float:
        """The nearest multiple of `q`, if there is a `q`."""
        return value if self.q is None else float(np.round(value / self.q) * self.q)

    def is_valid(self, value: Any) -> bool:
        """Whether the domain contains the value."""
        return is_number(value) and (self.distribution == "normal" or self.lower <= value <= self.upper)


@dataclass(frozen=True)
class Integer(_Numbers):
    """Whole numbers from `lower` on, below `upper`; with a `q` above 1, its multiples from `lower` to `upper` included."""

    lower: int
    upper: int
    q: int | None = None

    def __post_init__(self) -> None:
        _check_bounds(self)
        first, end = self.indices
        if first < -(2**63) or end > 2**63:
            raise TuneError(f"{self}: its bounds have more than 64 bits")
        if end <= first:
            raise TuneError(f"{self} has no value: there is no multiple of {self.q or 1} between its bounds")

    @property
    def indices(self) -> tuple[int, int]:
        """The values divided by `q`: the first, and the one after the last."""
        if self.q is None or self.q == 1:
            return self.lower, self.upper
        return math.ceil(self.lower / self.q), math.floor(self.upper / self.q) + 1

    @property
    def ends(self) -> tuple[int, int]:
        """The least and the greatest value that is drawn."""
        first, end = self.indices
        return first * (self.q or 1), (end - 1) * (self.q or 1)

    def sample(self, rng: np.random.Generator, spec: Any = None) -> int:
        """Draws a value."""
        first, end = self.indices
        if self.distribution == "loguniform":
            index = int(np.floor(_between(rng, first, end, self.distribution)))
        else:
            index = int(rng.integers(first, end, size=1)[0])
        return index * (self.q or 1)

    def is_valid(self, value: Any) -> bool:
        """Whether the domain contains the value."""
        first, end = self.indices
        return is_number(value) and value % (self.q or 1) == 0 and first <= value // (self.q or 1) < end


@dataclass(frozen=True)
class Categorical(Domain):
    """One of several values, each as likely."""

    categories: Sequence[Any]

    def __post_init__(self) -> None:
        if not self.categories:
            raise TuneError("choice([]) has no value: give it at least one")

    def sample(self, rng: np.random.Generator, spec: Any = None) -> Any:
        """Draws a value."""
        return self.categories[int(rng.integers(0, len(self.categories), size=1)[0])]

    def index(self, value: Any) -> int | None:
        """Which category the value is, or can be drawn of; None for none."""
        return next((index for index, category in enumerate(self.categories) if fits(category, value)), None)

    def is_valid(self, value: Any) -> bool:
        """Whether the domain contains the value."""
        return self.index(value) is not None

    def taken(self, value: Any, where: str) -> Any:
        """The category, with the value's in the place of domains in it."""
        if (index := self.index(value)) is None:
            raise TuneError(f"{where}: {value!r} is not in {self}")
        return _as_in(self.categories[index], value, where)


@dataclass(frozen=True)
class Function(Domain):
    """What a function makes of the configuration drawn so far."""

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        if not (self._takes(1) or self._takes(0)):
            raise TuneError(f"sample_from({self.function}): the function must take no argument, or one: the spec")

    def _takes(self, arguments: int) -> bool:
        try:
            signature(self.function).bind(*[None] * arguments)
        except TypeError:
            return False
        return True

    def sample(self, rng: np.random.Generator, spec: Any = None) -> Any:
        """Calls the function."""
        return self.function(spec) if self._takes(1) else self.function()

    def is_valid(self, value: Any) -> bool:
        """Whatever it returns is."""
        return True


def grid_search(values: Iterable[Any]) -> dict[str, list[Any]]:
    """Every one of the values, combined with every value of the other grids."""
    return {"grid_search": list(values)}


def uniform(lower: float, upper: float) -> Float:
    """A real number in `[lower, upper)`."""
    return Float(lower, upper)


def quniform(lower: float, upper: float, q: float) -> Float:
    """Likewise, rounded to a multiple of `q`; `upper` is included."""
    return Float(lower, upper, q=q)


def loguniform(lower: float, upper: float) -> Float:
    """A real number in `[lower, upper)` whose logarithm is uniform."""
    return Float(lower, upper, "loguniform")


def qloguniform(lower: float, upper: float, q: float) -> Float:
    """Likewise, rounded to a multiple of `q`; `upper` is included."""
    return Float(lower, upper, "loguniform", q)


def randn(mean: float = 0.0, sd: float = 1.0) -> Float:
    """A normally distributed real number."""
    return Float(mean, sd, "normal")


def qrandn(mean: float, sd: float, q: float) -> Float:
    """Likewise, rounded to a multiple of `q`."""
    return Float(mean, sd, "normal", q)


def randint(lower: int, upper: int) -> Integer:
    """A whole number from `lower` on, below `upper`."""
    return Integer(lower, upper)


def qrandint(lower: int, upper: int, q: int = 1) -> Integer:
    """A multiple of `q` from `lower` to `upper`, which is included unless `q` is 1."""
    return Integer(lower, upper, q=q)


def lograndint(lower: int, upper: int) -> Integer:
    """A whole number from `lower` on, below `upper`, whose logarithm is uniform before it is rounded down."""
    return Integer(lower, upper, "loguniform")


def qlograndint(lower: int, upper: int, q: int) -> Integer:
    """Likewise a multiple of `q`; `upper` is included unless `q` is 1."""
    return Integer(lower, upper, "loguniform", q)


def choice(categories: Sequence[Any]) -> Categorical:
    """One of the values, each as likely. A value may contain domains, which are drawn only if it is chosen."""
    return Categorical(list(categories))


def sample_from(function: Callable[..., Any]) -> Function:
    """What the function returns, which may depend on other values: `sample_from(lambda spec: spec.config.width * 2)`.

    `spec["width"]` and `spec.width` are the same. It must return a JSON value or a space. Since the function is not saved, only
    what it has returned, randomness in it is its own affair: take it from other keys of the space to have it repeat.
    """
    return Function(function)


def extremes(values: Any) -> list[Any]:
    """The values of a choice or a grid, and the least and the greatest of a domain with bounds; nothing of anything else."""
    if isinstance(values, Categorical):
        return list(values.categories)
    if isinstance(values, Float) and values.q is None and values.distribution != "normal":
        least, greatest = values.ends
        return [math.nextafter(least, greatest), greatest]  # the bound itself is as good as never drawn
    if isinstance(values, Float | Integer) and values.distribution != "normal":
        return [*values.ends]
    return values["grid_search"] if isinstance(values, dict) and "grid_search" in values else []


def _between(rng: np.random.Generator, lower: float, upper: float, distribution: Distribution) -> Any:
    """Draws one number; the array of one element is what keeps the stream that of `ray.tune`."""
    if distribution == "loguniform":
        return np.exp(rng.uniform(np.log(lower), np.log(upper), size=1))[0]
    return rng.uniform(lower, upper, size=1)[0]


def _check_bounds(domain: Float | Integer) -> None:
    numbers = [each for each in (domain.lower, domain.upper, domain.q) if each is not None]
    if any(isinstance(each, bool) or not isinstance(each, Real) for each in numbers):
        raise TuneError(f"{domain}: its bounds are numbers; true and false are none")
    if not all(abs(each) <= sys.float_info.max for each in numbers):
        raise TuneError(f"{domain}: its bounds must be finite")
    if domain.q is not None and not domain.q > 0:
        raise TuneError(f"{domain}: q is {domain.q}; it must be above 0")
    if domain.distribution == "normal":
        if not domain.upper > 0:
            raise TuneError(f"{domain}: the standard deviation is {domain.upper}; it must be above 0")
    elif domain.distribution == "loguniform" and not domain.lower > 0:
        raise TuneError(
            f"{domain}: the lower bound is {domain.lower}; a logarithmic domain begins above 0 (give the value, not its log)"
        )
    elif domain.upper < domain.lower:
        raise TuneError(f"{domain}: the upper bound is below the lower one")


def is_number(value: Any) -> bool:
    """Whether it is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_in(space: Any, value: Any, where: str) -> Any:
    """A value that fits a space, as the space has it."""
    if isinstance(space, Domain):
        return space.taken(value, where)
    if isinstance(space, dict):
        return {key: _as_in(inner, value[key], f"{where}/{key}") for key, inner in space.items()}
    if isinstance(space, list | tuple):
        return [_as_in(inner, each, where) for inner, each in zip(space, value, strict=True)]
    return space


def fits(space: Any, value: Any) -> bool:
    """Whether the value may be drawn of the space."""
    if isinstance(space, Domain):
        return space.is_valid(value)
    if isinstance(space, dict) and isinstance(value, dict):
        return space.keys() == value.keys() and all(fits(space[key], value[key]) for key in space)
    if isinstance(space, list | tuple) and isinstance(value, list | tuple):  # JSON makes lists of tuples
        return len(space) == len(value) and all(map(fits, space, value))
    return isinstance(space, bool) == isinstance(value, bool) and bool(space == value)  # 1 equals True
