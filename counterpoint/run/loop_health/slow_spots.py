"""Slow spots: places that made the loop late, as `metrics.jsonl`, the log, `counterpoint status` and a replay show them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from counterpoint.run.loop_health.blame_evidence import Kind
from counterpoint.run.loop_health.stacks import NOWHERE, CodePlace

METRIC = "event_loop_blame"
"""Metric with the worst slow spots of a step, a list of objects."""

WORST = 5
"""Slow spots in a metrics line."""

_NOTABLE_SHARE = 0.1
"""Code that took this share of the time is named before what has no name."""

_ADVICE = {
    Kind.CALLBACK: "move the work to a thread if it releases the GIL; if not, divide it or give it a process",
    Kind.GIL: "divide that C call, or give it a process",
    Kind.WAIT: "use the asynchronous call, or a thread",
    Kind.MACHINE: "run fewer processes a core, or use nice values",
    Kind.UNKNOWN: "",
}


@dataclass(frozen=True, slots=True)
class SlowSpot:
    """How often and how long one place made the loop late."""

    kind: Kind
    place: CodePlace
    callback: str = ""
    """The task's coroutine or the callback that the loop ran, if it is not the place's function."""
    thread: str = ""
    """Thread that held the GIL, without its number in a pool."""
    seconds: float = 0.0
    """Total lateness, a lower bound: when the loop was due is known, but not since when it was blocked."""
    worst: float = 0.0
    """The longest, in seconds."""
    count: int = 0
    """Number of late moments that it contributed to."""

    @property
    def advice(self) -> str:
        """What its user can do about it, in words; empty if that is not known."""
        if self.place.ours:
            return "this is Counterpoint's own code: nothing of yours needs to change; report it if it comes again"
        return _ADVICE[self.kind]

    @property
    def key(self) -> tuple[object, ...]:
        """Identity: slow spots with equal keys are the same."""
        return self.kind, self.place, self.callback, self.thread

    def plus(self, other: SlowSpot) -> SlowSpot:
        """Returns the sum of both."""
        return replace(
            self,
            seconds=self.seconds + other.seconds,
            worst=max(self.worst, other.worst),
            count=self.count + other.count,
        )

    def as_json(self) -> dict[str, Any]:
        """Returns a flat object for `metrics.jsonl`; `of_json` reads it."""
        fields = asdict(self)
        return {"kind": str(self.kind), **fields.pop("place"), **{n: fields[n] for n in fields if n != "kind"}}

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> SlowSpot:
        """Reads the object of `as_json`. Raises `KeyError` or `ValueError` for anything else."""
        ours = fields.get("ours") is True  # lines of older versions do not say
        place = CodePlace(fields["function"], fields["file"], fields["line"], fields["inside"], ours)
        numbers = {name: fields[name] for name in ("callback", "thread", "seconds", "worst", "count")}
        return cls(Kind(fields["kind"]), place, **numbers)

    def __str__(self) -> str:
        inside = f", in {self.place.inside}" if self.place.inside else ""
        where = f"{self.place.function} ({self.place.file}:{self.place.line}{inside})"
        if self.place == NOWHERE:
            where = "code whose stack was not seen"
        match self.kind:
            case Kind.CALLBACK:
                return f"the loop ran {where}"
            case Kind.GIL:
                return f"{f'thread {self.thread!r}' if self.thread else 'another thread'} held the GIL in {where}"
            case Kind.WAIT:
                return f"the loop waited in {where}"
            case Kind.MACHINE:
                return "the machine gave the CPU to others"
        return "the reason is unknown"


@dataclass(slots=True)
class SlowSpots:
    """A collection of slow spots, one per place."""

    moments: int = 0
    """How often the loop was late."""
    longest: float = 0.0
    """Seconds of the longest of these moments; 0 where metrics lines are read, which do not say it."""
    by_key: dict[tuple[object, ...], SlowSpot] = field(default_factory=dict)
    watched: bool = True
    """Whether the loop was watched all the time; if not, the numbers are incomplete."""

    def add(self, slow_spots: Iterable[SlowSpot]) -> None:
        """Adds slow spots."""
        for slow_spot in slow_spots:
            known = self.by_key.get(slow_spot.key)
            self.by_key[slow_spot.key] = known.plus(slow_spot) if known is not None else slow_spot

    def worst(self, count: int = WORST) -> list[SlowSpot]:
        """Returns the first of those in the order of `culprits_first`."""
        return culprits_first(self.by_key.values())[:count]

    def metrics(self) -> dict[str, Any]:
        """Returns metrics: `event_loop_late/n`, `event_loop_late/<kind>` in seconds, and the worst slow spots.

        Without the numbers if the loop was not watched: a zero would mean that it was never late.
        """
        seconds = dict.fromkeys(Kind, 0.0)
        for slow_spot in self.by_key.values():
            seconds[slow_spot.kind] += slow_spot.seconds
        worst = {METRIC: [slow_spot.as_json() for slow_spot in self.worst()]}
        if not self.watched:
            return worst
        return {
            "event_loop_late/n": self.moments,
            **{f"event_loop_late/{kind}": total for kind, total in seconds.items()},
            **worst,
        }


def culprits_first(slow_spots: Iterable[SlowSpot], notable_share: float = _NOTABLE_SHARE) -> list[SlowSpot]:
    """Returns the slow spots in the order in which a person should look at them.

    Code that has a name and took at least `notable_share` of the time comes first, the user's before ours: a machine without CPU
    to spare makes any stall longer, and is not what began it. What took longest is first among equals.
    """
    spots = list(slow_spots)
    notable = notable_share * sum(spot.seconds for spot in spots)

    def rank(spot: SlowSpot) -> int:
        return 2 if spot.place == NOWHERE or spot.seconds < notable else int(spot.place.ours)

    return sorted(spots, key=lambda spot: (rank(spot), -spot.seconds))


def in_words(slow_spots: Iterable[SlowSpot]) -> str:
    """Returns them in one line, each with its seconds, in the given order."""
    return "; ".join(f"{spot.seconds:.3f} s: {spot}" for spot in slow_spots)


def slow_spots_of(lines: Iterable[Mapping[str, Any]]) -> SlowSpots:
    """Collects the slow spots of metrics lines."""
    slow_spots = SlowSpots()
    for line in lines:
        slow_spots.moments += line.get("event_loop_late/n", 0)
        slow_spots.add(SlowSpot.of_json(fields) for fields in line.get(METRIC, []))
    return slow_spots


def pool_name(thread: str) -> str:
    """Returns a thread's name without its number in a pool: all threads of a pool do the same work."""
    return re.sub(r"[-_]\d+$", "", thread)


def merged(parts: Sequence[SlowSpot]) -> list[SlowSpot]:
    """Returns the slow spots of one late moment, each place once and counted once."""
    slow_spots = SlowSpots()
    slow_spots.add(parts)
    return [replace(slow_spot, worst=slow_spot.seconds, count=1) for slow_spot in slow_spots.by_key.values()]
