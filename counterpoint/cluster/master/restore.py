"""What a new master begins with: the state of the job, which is the fold of its journal, compared with what it finds alive.

Agents repeat every report that is in no journal, so most differences explain themselves. What is left: processes that the state
does not know any more, and workers of the state that no agent has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from counterpoint.cluster.agent.order import LivingWorker
from counterpoint.cluster.manager import events
from counterpoint.cluster.manager.events import Event, Instruction
from counterpoint.cluster.manager.manager import PrimeManager
from counterpoint.cluster.manager.state import ALIVE, JobState, Phase
from counterpoint.cluster.master.event_codec import UnknownEvent, decode
from counterpoint.cluster.master.journal import History
from counterpoint.cluster.master.journal_format import JournalError
from counterpoint.cluster.spec import JobSpec

KILLED = 137
"""The exit code of a process whose end nobody saw: as if killed."""

GONE = "it had ended, and its agent with it, when a master looked again"
"""Why a worker is counted as ended that neither lives nor has its end reported: an agent that lives would have kept the
report."""

REPORT_SECONDS = 0.5
"""How long the report of an end may take to arrive, before a worker that no agent has counts as dead without one."""


@dataclass(slots=True)
class Differences:
    """The differences that were found."""

    news: list[Event] = field(default_factory=list)
    """What happened while there was no master, as far as it can be seen."""
    strays: list[events.Kill] = field(default_factory=list)
    """Processes that must not be there."""
    missing: list[events.WorkerExited] = field(default_factory=list)
    """Ends of which the report may still arrive."""


def compare(state: JobState, living: Sequence[LivingWorker], nodes: Collection[str]) -> Differences:
    """Returns how what lives differs from the state.

    `nodes` are those that answered; what is missing is known of these alone. Of others the backend says whether they are lost.
    """
    found = Differences()
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


def opening_events(history: History, epoch: int) -> list[Event]:
    """Returns the first events of a master with that epoch, which follow what was read."""
    at = last_time(history)
    change = events.MasterChanged(epoch, at)
    return [change, events.Begin(at)] if history.last == 0 else [change]


def last_time(history: History) -> float:
    """Returns the job's time at the last event that was read; 0 before the first."""
    for entry in reversed(history.entries):
        for event in reversed(entry.events):
            return float(event["at"])
    return float(history.snapshot.state["at"]) if history.snapshot is not None else 0.0


def fold(spec: JobSpec, history: History) -> tuple[PrimeManager, list[Instruction]]:
    """Returns the manager after every event, and the instructions of the last entry, whose execution is not known.

    Raises `JournalError` for an event that this version does not know.
    """
    manager = PrimeManager(spec, None if history.snapshot is None else history.snapshot.state["manager"])
    instructions: list[Instruction] = []
    for entry in history.entries:
        instructions = []
        for data in entry.events:
            try:
                event = decode(data)
            except UnknownEvent as error:
                raise JournalError(f"entry {entry.number} of the journal is of another version: {error}") from None
            instructions += manager.handle(event)
    return manager, instructions


def state_of(manager: PrimeManager, at: float) -> dict[str, object]:
    """Returns what a snapshot holds."""
    return {"manager": manager.snapshot(), "at": at}
