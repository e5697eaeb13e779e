"""What an actor on Ray reports of its worker: numbered, kept until the master has it in its journal, and bounded.

A report is an event of `counterpoint/cluster/manager/events.py` without its time. Of each worker at most one report of a kind is
kept, for the newest incarnation, and at most `MOST_REQUESTS` requests to replace others; so neither a worker in a loop nor a
master that stays away fills the actor's memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from counterpoint.cluster.manager import events
from counterpoint.cluster.manager.events import Event
from counterpoint.transport.frames import BadFrame
from counterpoint.transport.typed import typed
from counterpoint.transport.unpacked import shown

MOST_REQUESTS = 32
"""Unacknowledged requests of one worker to replace others."""

REPORTED: Mapping[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        events.Created,
        events.CreateFailed,
        events.WorkerReady,
        events.WorkerStarted,
        events.WorkFinished,
        events.EndAnnounced,
        events.ExtensionRequested,
        events.WorkerExited,
        events.ChildrenChecked,
        events.FailoverDone,
        events.ReplaceRequested,
        events.ScaleRequested,
        events.StopRequested,
    )
}
"""The events that an actor may report."""


def event_of(report: Mapping[str, Any], at: float) -> Event:
    """Returns the event that a report describes. Raises `BadFrame`."""
    name, fields = report.get("event"), report.get("fields")
    kind = REPORTED.get(name) if isinstance(name, str) else None
    if kind is None or not isinstance(fields, dict):
        raise BadFrame(f"a report of {shown(name)} with fields {type(fields).__name__} is none that actors send")
    if fields.keys() != (expected := {field.name for field in dataclasses.fields(kind)} - {"at"}):
        raise BadFrame(f"a report of {name} has the fields {sorted(fields)}; expected {sorted(expected)}")
    return typed({**fields, "at": at}, kind, f"a report of {name}", BadFrame)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One report, as it is sent."""

    number: int
    event: str
    fields: Mapping[str, Any]


class Reports:
    """The reports that no master has acknowledged, in order."""

    def __init__(self) -> None:
        self._last = 0
        self._kept: dict[int, tuple[str, int, Report]] = {}
        """Reports by number: the worker that it is about or from, its incarnation, and the report."""

    def add(self, worker: str, incarnation: int, event: type[Event], fields: Mapping[str, Any]) -> Report | None:
        """Keeps a report and returns it; None if the same one is kept already, or too many of its kind are."""
        name = event.__name__
        same = [
            number
            for number, (of, of_incarnation, report) in self._kept.items()
            if (of, of_incarnation, report.event) == (worker, incarnation, name)
        ]
        if any(self._kept[number][2].fields == fields for number in same):
            return None
        if event is events.ReplaceRequested:
            if len(same) >= MOST_REQUESTS:
                return None
        elif event is events.StopRequested:
            if same:
                return None
        else:
            for number in same:
                del self._kept[number]  # a later one of the kind says more
        self._last += 1
        report = Report(self._last, name, fields)
        self._kept[self._last] = (worker, incarnation, report)
        return report

    def pending(self, worker: str, incarnation: int, event: type[Event]) -> bool:
        """Whether such a report is kept."""
        name = event.__name__
        return any((of, its, report.event) == (worker, incarnation, name) for of, its, report in self._kept.values())

    def acknowledge(self, number: int) -> None:
        """Forgets every report up to that number."""
        for kept in [kept for kept in self._kept if kept <= number]:
            del self._kept[kept]

    def forget_before(self, worker: str, incarnation: int) -> None:
        """Forgets the reports of a worker's earlier incarnations: a master that creates the next one knows their end."""
        for number in [n for n, (of, its, _) in self._kept.items() if of == worker and its < incarnation]:
            del self._kept[number]

    def after(self, number: int) -> list[Report]:
        """Returns the kept reports above that number, in order."""
        return [report for kept, (_, _, report) in self._kept.items() if kept > number]

    @property
    def last_kept(self) -> int:
        """The number of the last report that is kept; 0 if none is."""
        return max(self._kept, default=0)

    def __len__(self) -> int:
        return len(self._kept)
