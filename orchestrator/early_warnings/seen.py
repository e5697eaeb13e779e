"""The metrics of a run so far, as far as the rules look: its first steps, and its newest."""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

FIRST, NEWEST = 5, 200
"""Values of a metric that are kept: of the run's first steps, with which it is compared, and of its newest."""

MOST_NAMES = 4096
"""Metrics that are kept: the first ones. A file may have any number."""

LARGEST = 1e100
"""A value beyond this does not count: sums and squares of others are finite."""

_WATCHED = (
    "reward/", "length/", "groups/", "answers/", "evaluation/",
    "entropy", "ess/", "masked_share", "grad_kept", "reference_kl",
)  # fmt: skip
"""What the names of kept metrics begin with."""

_OF_ONE = re.compile(r"reward/[^/]+/(?:player|turn)/|evaluation/[^/]+/[^/]+/reward/turn/")
"""What the names of rewards of one player or one turn begin with, which are not kept: another's may rise by as much."""

COPIED = "copied/run"
"""What the trainer's line has where it copied another run's weights."""

Point = tuple[int, float]
"""A step, and the value of a metric then."""


@dataclass(slots=True)
class Seen:
    """The kept values of each metric, by its name in `metrics.jsonl` of orchestrator or trainer."""

    paid_parts: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Maps an environment with a rubric to the names of the parts that raise the reward. It keeps no other metric of one."""
    _first: dict[str, list[Point]] = field(default_factory=dict)
    _newest: dict[str, deque[Point]] = field(default_factory=dict)
    _begun: int = -1
    """The step up to which nothing counts."""
    _of_parts: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self._of_parts = frozenset(name for each in self.paid_parts for name in self.names_of_parts(each).values())

    def add(self, line: Mapping[str, object]) -> None:
        """Adds a step's line. A step that was there, or an earlier one, changes nothing.

        Where another run's weights were copied into this one, as in a population, the run begins anew.
        """
        step = line.get("step")
        if not isinstance(step, int) or step <= self._begun:
            return
        if COPIED in line:
            self._begin_anew(step)
        for name, value in line.items():
            if not (isinstance(value, int | float) and -LARGEST <= value <= LARGEST and self._is_kept(name)):
                continue
            newest = self._newest.setdefault(name, deque(maxlen=NEWEST))
            if not newest or newest[-1][0] < step:
                newest.append((step, float(value)))
                if len(first := self._first.setdefault(name, [])) < FIRST:
                    first.append((step, float(value)))

    def _begin_anew(self, step: int) -> None:
        self._begun = step
        later = {name: [each for each in newest if each[0] > step] for name, newest in self._newest.items()}
        self._newest = {name: deque(points, maxlen=NEWEST) for name, points in later.items() if points}
        self._first = {name: points[:FIRST] for name, points in later.items() if points}

    def _is_kept(self, name: str) -> bool:
        if name in self._newest:
            return True
        if len(self._newest) >= MOST_NAMES:
            return False
        return name in self._of_parts or (name.startswith(_WATCHED) and _OF_ONE.match(name) is None)

    def names_of_parts(self, environment: str) -> dict[str, str]:
        """Returns the names of the metrics of an environment's parts that raise the reward, by part."""
        return {part: f"environment/{environment}/{part}/mean" for part in self.paid_parts[environment]}

    @property
    def names(self) -> Collection[str]:
        """The names of the metrics, as they came."""
        return self._newest.keys()

    def between(self, head: str, tail: str) -> list[str]:
        """Returns the part between `head` and `tail` of each name that has both and no other slash, in order."""
        found = [
            name[len(head) : len(name) - len(tail)]
            for name in self._newest
            if name.startswith(head) and name.endswith(tail)
        ]
        return sorted(part for part in found if part and "/" not in part)

    def points(self, name: str, count: int = NEWEST) -> list[Point]:
        """Returns the newest values, `count` at most."""
        return [*self._newest.get(name, ())][-count:]

    def newest(self, name: str, count: int) -> list[float]:
        """Returns the `count` newest values, or none if there are fewer."""
        values = [value for _, value in self.points(name, count)]
        return values if len(values) == count else []

    def first(self, name: str) -> float | None:
        """Returns the median of the run's first steps; None before there are `FIRST`."""
        values = [value for _, value in self._first.get(name, ())]
        return statistics.median(values) if len(values) == FIRST else None


@dataclass(frozen=True, slots=True)
class FittedLine:
    """The straight line through values of a metric."""

    move: float
    """How far it rises from the first step to the last."""
    error: float
    """The standard error of that, from the values' distances to the line."""

    @property
    def certainty(self) -> float:
        """The move in standard errors."""
        return self.move / self.error if self.error > 0 else math.copysign(math.inf, self.move) if self.move else 0.0


def trend(values: Sequence[float]) -> FittedLine:
    """Returns the trend of three or more values, by least squares over their order."""
    count = len(values)
    places = [place - (count - 1) / 2 for place in range(count)]
    spread = sum(place * place for place in places)
    mean = statistics.fmean(values)
    slope = sum(place * (value - mean) for place, value in zip(places, values, strict=True)) / spread
    rest = [value - mean - slope * place for place, value in zip(places, values, strict=True)]
    left = sum(each * each for each in rest)  # `**` would raise where this is infinite
    return FittedLine(slope * (count - 1), math.sqrt(left / (count - 2) / spread) * (count - 1))
