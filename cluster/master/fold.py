"""The state of a job as the fold of its journal."""

from __future__ import annotations

from cluster.manager.events import Begin, Event, Instruction, MasterChanged
from cluster.manager.manager import PrimeManager
from cluster.master.event_codec import UnknownEvent, decode
from cluster.master.journal import History
from cluster.master.journal_format import JournalError
from cluster.spec import JobSpec


def opening_events(history: History, epoch: int) -> list[Event]:
    """Returns the first events of a master with that epoch, which follow what was read."""
    at = last_time(history)
    change = MasterChanged(epoch, at)
    return [change, Begin(at)] if history.last == 0 else [change]


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
