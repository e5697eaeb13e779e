"""An experiment that outlives its runner: the state machine with its journal and snapshots, and what is told again after a kill.

Events enter by `decide`, which folds them; `commit` makes them durable and returns what they led to. Nothing is carried out
before that. `resumed` folds what another runner left.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from counterpoint.transport.files.format_number import check_format
from counterpoint.transport.files.journal import FileJournal
from counterpoint.tune.errors import TuneError
from counterpoint.tune.runner import codec
from counterpoint.tune.runner.events import Event, Instruction
from counterpoint.tune.runner.journal import open_journal, take_experiment
from counterpoint.tune.runner.machine import ExperimentMachine
from counterpoint.tune.runner.machine_state import restore, state_of

FORMAT = 1


class DurableExperiment:
    """The state machine of an experiment, and its journal if it has a directory."""

    def __init__(self, machine: ExperimentMachine, directory: Path | None) -> None:
        """Takes the directory's lock. Raises `TuneError` if another process holds it."""
        self.machine = machine
        self._directory = directory
        self._lock = -1 if directory is None else take_experiment(directory)
        self._journal: FileJournal | None = None
        self._records: list[bytes] = []
        self._instructions: list[Instruction] = []
        self._is_broken_off = False
        """Whether an event was decided, or instructions were carried out, in part only."""

    def resumed(
        self, others: Callable[[dict[str, Any]], None], replayed: Callable[[Event, list[Instruction]], None]
    ) -> bool:
        """Folds what is in the directory; returns False if there is nothing.

        `others` gets what `snapshot` was given; `replayed` each event after it, with the instructions that followed then.
        """
        if self._directory is None:
            return False
        self._journal, records = open_journal(self._directory)
        for record in records:
            entry = codec.unpack(record)
            if isinstance(entry, dict):
                self._restore(entry)
                others(entry["others"])
            else:
                event = codec.decode(entry)
                replayed(event, self._handle(event))
        return bool(records)

    def _restore(self, state: dict[str, Any]) -> None:
        try:
            check_format(state.get("format"), FORMAT)
        except ValueError as error:
            raise TuneError(f"{self._directory}: the state in the journal cannot be used: {error}") from error
        self._check_scheduler(state["scheduler"])
        restore(self.machine, state["machine"])

    def decide(self, event: Event) -> bool:
        """Lets the state machine handle an event, if it accepts it; returns whether it did.

        Raises `TypeError`, `ValueError` or `OverflowError`, before anything has changed, for an event that is no data.
        """
        if not self.machine.accepts(event):
            return False
        if self._directory is not None:
            self._records.append(codec.encode(event))
        self._instructions += self._handle(event)
        return True

    def commit(self) -> list[Instruction]:
        """Makes the events durable; returns what is to be carried out, in order. Raises `OSError` (disk full)."""
        self._write()
        instructions, self._instructions = self._instructions, []
        return instructions

    def _write(self) -> None:
        if self._journal is not None and self._records:
            self._journal.append([record] for record in self._records)
            self._records = []

    @property
    def has_instructions(self) -> bool:
        """Whether something was decided that is not carried out."""
        return bool(self._instructions)

    @property
    def snapshot_is_due(self) -> bool:
        """Whether the journal has grown so much that a snapshot is worth its bytes."""
        return self._journal is not None and self._journal.has_grown

    def break_off(self) -> None:
        """Says that not all instructions will be carried out: a resume gives them again, from the journal."""
        self._is_broken_off = True

    def snapshot(self, others: dict[str, Any]) -> None:
        """Writes the state, once all that was decided is carried out; `others` is the state of what is outside the state machine.

        Until then the journal is all that is written: a resume from a snapshot gives none of the instructions before it again.
        """
        if self._journal is None:
            return
        if self._is_broken_off or self._instructions:
            if not self._is_broken_off:
                self._write()
            self._journal.flush()
            return
        scheduler = type(self.machine.scheduler).__qualname__
        state = {"format": FORMAT, "scheduler": scheduler, "machine": state_of(self.machine), "others": others}
        self._journal.compact([[codec.pack(state)]])
        self._records = []  # the state has what came of them

    def flush(self) -> None:
        """Waits until the disk has what was committed."""
        if self._journal is not None:
            self._journal.flush()

    def close(self) -> None:
        """Releases the directory, once the disk has what was committed."""
        try:
            self.flush()
        finally:
            if self._journal is not None:
                self._journal.close()
            if self._lock >= 0:
                os.close(self._lock)

    def _handle(self, event: Event) -> list[Instruction]:
        try:
            return self.machine.handle(event)
        except TuneError:
            self._is_broken_off = True
            raise
        except Exception as error:
            self._is_broken_off = True
            scheduler = type(self.machine.scheduler).__qualname__
            raise TuneError(
                f"deciding on {type(event).__name__} with the scheduler {scheduler} failed, so the experiment ends; it can be "
                f"resumed once this is mended:\n{traceback.format_exc()}"
            ) from error

    def _check_scheduler(self, before: str) -> None:
        now = type(self.machine.scheduler).__qualname__
        if before != now:
            raise TuneError(
                f"the experiment was begun with the scheduler {before}, and is resumed with {now}; use the same"
            )
