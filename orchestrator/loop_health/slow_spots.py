"""What made the loop late, by place: the records that `metrics.jsonl`, the log, `counterpoint status` and a replay show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from orchestrator.loop_health.blame_evidence import Kind
from orchestrator.loop_health.stacks import NOWHERE, Place

METRIC = "event_loop_blame"
"""Of a metrics line: its worst slow_spots, a list of objects."""

WORST = 5
"""SlowSpots a metrics line holds."""


@dataclass(frozen=True, slots=True)
class SlowSpot:
    """How often and how long one place made the loop late."""

    kind: Kind
    place: Place
    callback: str = ""
    """The task's coroutine or the callback that the loop ran, where that is another function than the place's."""
    thread: str = ""
    """Who held the GIL; the number of a pool's thread is left out."""
    seconds: float = 0.0
    """Altogether, at least: when the loop should have answered is known, since when it could not is not."""
    worst: float = 0.0
    """The longest, in seconds."""
    count: int = 0
    """Late moments it had a part in."""

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two slow spots the same."""
        return self.kind, self.place, self.callback, self.thread

    def plus(self, other: SlowSpot) -> SlowSpot:
        """Both together."""
        return replace(
            self,
            seconds=self.seconds + other.seconds,
            worst=max(self.worst, other.worst),
            count=self.count + other.count,
        )

    def as_json(self) -> dict[str, Any]:
        """A flat object for `metrics.jsonl`; `of_json` reads it."""
        fields = asdict(self)
        return {"kind": str(self.kind), **fields.pop("place"), **{n: fields[n] for n in fields if n != "kind"}}

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> SlowSpot:
        """Raises `KeyError` or `ValueError` for what is not an slow_spot."""
        place = Place(fields["function"], fields["file"], fields["line"], fields["inside"])
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
        return "it cannot be told why"


@dataclass(slots=True)
class SlowSpots:
    """A collection of them, one a place."""

    moments: int = 0
    """How often the loop was late."""
    by_key: dict[tuple[object, ...], SlowSpot] = field(default_factory=dict)
    watched: bool = True
    """Whether the loop was watched all the while; if not, there may have been any number."""

    def add(self, slow_spots: Iterable[SlowSpot]) -> None:
        """Takes them in."""
        for slow_spot in slow_spots:
            known = self.by_key.get(slow_spot.key)
            self.by_key[slow_spot.key] = known.plus(slow_spot) if known is not None else slow_spot

    def worst(self, count: int = WORST) -> list[SlowSpot]:
        """Those that took longest, the first one most."""
        return sorted(self.by_key.values(), key=lambda slow_spot: -slow_spot.seconds)[:count]

    def metrics(self) -> dict[str, Any]:
        """For a step's metrics line: `event_loop_late/n`, `event_loop_late/<kind>` in seconds, and the worst slow_spots.
        Where the loop was not watched the numbers are left out: a zero would say that it was never late."""
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


def slow_spots_of(lines: Iterable[Mapping[str, Any]]) -> SlowSpots:
    """Those of all steps, from their metrics lines."""
    slow_spots = SlowSpots()
    for line in lines:
        slow_spots.moments += line.get("event_loop_late/n", 0)
        slow_spots.add(SlowSpot.of_json(fields) for fields in line.get(METRIC, []))
    return slow_spots


def pool_name(thread: str) -> str:
    """A thread's name without its number in a pool: what one of them does, all do."""
    return re.sub(r"[-_]\d+$", "", thread)


def merged(parts: Sequence[SlowSpot]) -> list[SlowSpot]:
    """The slow spots of one late moment, each place once and counted once."""
    slow_spots = SlowSpots()
    slow_spots.add(parts)
    return [replace(slow_spot, worst=slow_spot.seconds, count=1) for slow_spot in slow_spots.by_key.values()]
