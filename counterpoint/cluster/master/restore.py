"""What a new master begins with: the state of the job that the last one wrote, compared with what it finds alive.

Keepers repeat every report that was not acknowledged, so most differences explain themselves. What is left: processes that the
state does not know any more, and workers of the state that no keeper has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from counterpoint.cluster.backends.order import LivingWorker
from counterpoint.cluster.manager import events
from counterpoint.cluster.manager.events import Event
from counterpoint.cluster.manager.state import ALIVE, JobState, Phase

KILLED = 137
"""The exit code of a process whose end nobody saw: as if killed."""

GONE = "it had ended, and its keeper with it, when a master looked again"
"""Why a worker is counted as ended that neither lives nor has its end reported: a keeper that lives would have kept the
report."""

REPORT_SECONDS = 0.5
"""How long the report of an end may take to arrive, before a worker that no keeper has counts as dead without one."""


@dataclass(slots=True)
class _Differences:
    """The differences that were found."""

    news: list[Event] = field(default_factory=list)
    """What happened while there was no master, as far as it can be seen."""
    strays: list[events.Kill] = field(default_factory=list)
    """Processes that must not be there."""
    missing: list[events.WorkerExited] = field(default_factory=list)
    """Ends of which the report may still arrive."""


def compare(state: JobState, living: Sequence[LivingWorker], nodes: Collection[str]) -> _Differences:
    """Returns how what lives differs from the state.

    `nodes` are those that answered; what is missing is known of these alone. Of others the backend says whether they are lost.
    """
    found = _Differences()
    alive: set[str] = set()
    for one in living:
        record = state.workers.get(one.worker)
        if record is None or record.phase not in ALIVE or record.incarnation != one.incarnation:
            found.strays.append(events.Kill(one.worker, one.incarnation))
            continue
        alive.add(one.worker)
        if record.phase is Phase.CREATING:
            found.news.append(events.Created(one.worker, one.incarnation, one.node, one.pid, 0.0))
        if one.ready and record.phase in (Phase.CREATING, Phase.INITIALIZING):
            found.news.append(events.WorkerReady(one.worker, one.incarnation, one.address, one.server_key, 0.0))
    for record in state.workers.values():
        is_there = record.phase in ALIVE and record.phase is not Phase.CREATING
        if is_there and record.name not in alive and record.node in nodes:
            found.missing.append(events.WorkerExited(record.name, record.incarnation, KILLED, GONE, 0.0, lost=True))
    return found
