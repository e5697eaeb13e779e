"""The runs of a trainer, one record each, and every transition between their stages. Pure: no I/O, and times are passed in.

What the directories and the wire show comes in by method calls; `counterpoint/trainer/runs/manager.py`,
`counterpoint/trainer/work/sessions.py` and `counterpoint/trainer/shells/entrance.py` do the I/O and read the records. Rank 0's
registry has all runs, that of another rank only the runs in slots. The model is the worker state machine of dask.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal

from counterpoint.run.trained import TrainedRun
from counterpoint.trainer.runs.control_files import RunDirectory
from counterpoint.trainer.runs.record import TAKES_BATCHES, TRANSITIONS, RunRecord, RunStage
from counterpoint.trainer.runs.run import Run, RunProgress
from counterpoint.trainer.runs.slot_plan import SlotChanges, plan
from counterpoint.transport.messages import Hello


class RunRegistry:
    """The records by run id, and an index of them by slot."""

    def __init__(self, max_runs: int) -> None:
        """Starts with `max_runs` free slots and no run."""
        self.max_runs = max_runs
        self.queue: list[str] = []
        """Runs that waited for a slot at the last `plan`, in the order in which they get one."""
        self._records: dict[str, RunRecord] = {}
        self._slots: dict[int, RunRecord] = {}
        self._departed: list[Run] = []
        """Created on this rank and vacated since; their deletion hooks are still to be called."""
        self._missing: list[tuple[str, int]] = []
        self._admissions = 0

    # --- reading ---

    def __iter__(self) -> Iterator[RunRecord]:
        """Iterates over the records in the order in which the runs were first seen."""
        return iter(self._records.values())

    def find(self, run_id: str) -> RunRecord | None:
        """Returns the record of a run; None if it is unknown."""
        return self._records.get(run_id)

    @property
    def run_ids(self) -> dict[int, str]:
        """The taken slots: slot to run id."""
        return {slot: record.run_id for slot, record in sorted(self._slots.items())}

    def slot_of(self, run_id: str) -> int | None:
        """Returns the slot of a run; None if it has none."""
        record = self._records.get(run_id)
        return record.run.slot if record is not None and record.run is not None else None

    def in_slot(self, slot: int) -> Run:
        """Returns what a slot holds. Raises `KeyError` if it is free."""
        if slot not in self._slots:
            raise KeyError(f"slot {slot} is free; in use are {sorted(self._slots)} of {self.max_runs} slots from 0 on")
        run = self._slots[slot].run
        assert run is not None
        return run

    def at(self, *stages: RunStage) -> list[Run]:
        """Returns what the slots hold whose runs are in one of these stages, by slot; without stages, of all runs."""
        found = [record for _, record in sorted(self._slots.items()) if not stages or record.stage in stages]
        return [record.run for record in found if record.run is not None]

    def taking(self, run_id: str) -> Run | None:
        """Returns what the slot of a run holds, if the run's batches are taken; else None."""
        record = self._records.get(run_id)
        return record.run if record is not None and record.stage in TAKES_BATCHES else None

    @property
    def refused(self) -> dict[str, str]:
        """Runs that get no slot as they are, and why."""
        return {record.run_id: record.reason for record in self if record.reason is not None}

    @property
    def expected(self) -> set[str]:
        """The runs that have a directory, whether it is seen or not: those in slots, and of connected orchestrators."""
        return {record.run_id for record in self if record.run is not None or record.orchestrator.connected}

    @property
    def unanswered(self) -> int:
        """How many orchestrators wait for an answer to their `HELLO`, or for a slot."""
        return sum(record.orchestrator.unanswered_since is not None for record in self)

    # --- the directories ---

    def take_scan(self, seen: Mapping[str, RunDirectory], evictions: Mapping[str, str]) -> list[RunDirectory]:
        """Takes over what a scan of the job's directory found.

        Args:
            seen: by run id.
            evictions: by run id, of those that are evicted, why.

        Returns:
            The directories whose configurations are to be checked: `accept` or `refuse` follows.
        """
        self._missing = [
            (record.run_id, record.directory)
            for record in self
            if record.had_slot and record.run is None and record.directory is not None
            if (found := seen.get(record.run_id)) is None or found.directory != record.directory
        ]
        for run_id, found in seen.items():
            record = self._record(run_id)
            record.found, record.eviction = found, evictions.get(run_id)
            record.directory = found.directory
            self._settle(record)
        for record in list(self):
            if record.run_id not in seen:
                record.found = record.checked = record.config = record.refusal = record.eviction = None
                self._settle(record)
        return [
            found
            for run_id, found in seen.items()
            if run_id not in evictions and self._records[run_id].checked != found
        ]

    @property
    def missing(self) -> list[tuple[str, int]]:
        """Runs that lost their slots before, and whose directories `take_scan` did not find, with the inodes of these."""
        return list(self._missing)

    def directory_deleted(self, run_id: str) -> None:
        """Notes that the directory of a run without a slot was deleted, and not only its configuration."""
        record = self._records[run_id]
        record.ended = record.ended or RunStage.DELETED
        if record.found is None:
            record.directory = None
        self._settle(record)

    def accept(self, found: RunDirectory, config: TrainedRun) -> None:
        """Notes that the configuration in a directory can be trained."""
        record = self._record(found.run_id)
        record.checked, record.config, record.refusal = found, config, None
        self._settle(record)

    def refuse(self, run_id: str, reason: str, found: RunDirectory | None = None) -> None:
        """Notes that a configuration cannot be trained; without `found`, the configuration that was accepted.

        The run leaves its slot, if it has one, at the next discovery.
        """
        record = self._record(run_id)
        record.checked, record.config, record.refusal = found or record.checked, None, reason
        self._settle(record)

    # --- slots ---

    @property
    def gone(self) -> dict[int, str]:
        """The slots, with their runs' ids, whose runs the last `take_scan` did not find, or found evicted or replaced."""
        return {
            slot: record.run_id
            for slot, record in sorted(self._slots.items())
            if record.found is None
            or record.eviction is not None
            or record.found.directory != self.in_slot(slot).directory
        }

    def plan(self, present: Collection[str] | None = None) -> SlotChanges:
        """Decides which runs leave and which are admitted, and sets `queue`; `vacate` and `occupy` follow for each.

        Args:
            present: the runs whose orchestrators are present; no other gets a slot. None: all count as present.
        """
        since = {
            record.run_id: record.checked.since for record in self if record.admissible and record.checked is not None
        }
        renewed = {record.run_id for record in self._slots.values() if record.admissible and _is_renewed(record)}
        changes = plan(self.run_ids, since, max_runs=self.max_runs, renewed=renewed, present=present)
        for slot in changes.leaving:
            self.leave(slot)
        self.queue = changes.waiting
        return changes

    def occupy(self, slot: int, run_id: str, descriptor: int | None = None) -> Run:
        """Admits a waiting run to a free slot, with the configuration that was accepted last."""
        record = self._records[run_id]
        assert record.config is not None
        assert record.checked is not None
        self._admissions += 1
        config = record.config
        return self._put(Run(slot, run_id, self._admissions, config, config, record.checked.directory, descriptor))

    def adopt(
        self,
        slot: int,
        run_id: str,
        number: int,
        config: TrainedRun,
        progress: RunProgress,
        beginning: Path | None = None,
    ) -> None:
        """Does on another rank what `occupy` has done on rank 0."""
        self._move(self._record(run_id), RunStage.WAITING)
        self._put(Run(slot, run_id, number, config, progress=progress, beginning=beginning))

    def leave(self, slot: int) -> None:
        """Stops taking batches of the run in a slot; it loses the slot at the next discovery."""
        run = self.in_slot(slot)
        self._move(self._slots[slot], RunStage.LEAVING)
        run.wire.session, run.wire.refusals = None, 0

    def vacate(self, slot: int) -> Run:
        """Frees a slot. Returns what it held; the caller closes its descriptor, if there is one."""
        self.leave(slot)
        run, record = self.in_slot(slot), self._slots.pop(slot)
        record.run = None
        if run.created:
            self._departed.append(run)
        self._settle(record)
        return run

    def take_departed(self) -> list[Run]:
        """Returns, once, what this rank has created and must delete, by slot."""
        departed, self._departed = sorted(self._departed, key=lambda run: run.slot), []
        return departed

    def end(self, run_id: str, how: Literal[RunStage.EVICTED, RunStage.DELETED]) -> None:
        """Notes how a run that leaves its slot has ended."""
        self._record(run_id).ended = how

    # --- training ---

    def advance(self, slot: int, now: float) -> None:
        """Marks the run as training, or as finished once all its steps are trained.

        An orchestrator that missed the last acknowledgement, because it was killed, then has `trainer_timeout_seconds` to get it.
        """
        record, run = self._slots[slot], self.in_slot(slot)
        finished = run.finished
        self._move(record, RunStage.FINISHED if finished else RunStage.TRAINING)
        record.had_slot, record.ended = True, None
        record.orchestrator.bye_deadline = now + run.config.trainer_timeout_seconds if finished else math.inf

    # --- the orchestrators ---

    def connected(self, hello: Hello) -> None:
        """Notes a `HELLO`."""
        orchestrator = self._record(hello.run_id).orchestrator
        orchestrator.connected, orchestrator.unreachable_since, orchestrator.last_answer = True, math.inf, None
        orchestrator.hello, orchestrator.confirmed = hello, False

    def durable(self, run_id: str) -> int:
        """Returns the last step whose batch the run's orchestrator cannot send again, as its last `HELLO` said."""
        hello = self._record(run_id).orchestrator.hello
        return hello.durable if hello is not None else 0

    def disconnected(self, run_id: str, now: float) -> None:
        """Notes a `BYE`."""
        record = self._record(run_id)
        record.orchestrator.connected = False
        if record.orchestrator.bye_deadline < math.inf:
            record.orchestrator.bye_deadline = now
        self.answered(run_id)

    def sent_away(self, run_id: str) -> None:
        """Notes that an orchestrator was sent `EVICTED`, or could not be reached to be sent `WAITING`; it may connect again."""
        orchestrator = self._record(run_id).orchestrator
        orchestrator.connected, orchestrator.bye_deadline = False, math.inf
        self.answered(run_id)

    def unreachable(self, run_id: str, now: float, patience: float) -> None:
        """Notes that a message did not reach an orchestrator, which still counts as present for `patience` seconds."""
        orchestrator = self._record(run_id).orchestrator
        orchestrator.unreachable_since = min(orchestrator.unreachable_since, now)
        orchestrator.patience = patience

    def await_answer(self, run_id: str, now: float) -> float:
        """Notes that the orchestrator of a run without a slot awaits an answer. Returns since when."""
        orchestrator = self._record(run_id).orchestrator
        if orchestrator.unanswered_since is None:
            orchestrator.unanswered_since = now
        return orchestrator.unanswered_since

    def repeats(self, run_id: str, answer: str, now: float, seconds: float) -> bool:
        """Returns whether the same answer was given less than `seconds` ago; if not, notes it as given."""
        orchestrator = self._record(run_id).orchestrator
        if (
            orchestrator.last_answer is not None
            and orchestrator.last_answer[0] == answer
            and now - orchestrator.last_answer[1] < seconds
        ):
            return True
        orchestrator.last_answer = (answer, now)
        return False

    def answered(self, run_id: str) -> None:
        """Notes that the orchestrator no longer awaits an answer."""
        record = self._record(run_id)
        record.orchestrator.unanswered_since = record.orchestrator.last_answer = None
        self._forget_stranger(record)

    def finished_before(self, run_id: str, bye_deadline: float) -> None:
        """Notes that an earlier process of this trainer trained the run to its end."""
        record = self._record(run_id)
        record.had_slot, record.ended, record.orchestrator.bye_deadline = True, None, bye_deadline

    def present(self, now: float) -> set[str]:
        """Returns the runs whose orchestrators are present."""
        return {record.run_id for record in self if record.orchestrator.is_present(now)}

    def over(self, now: float) -> bool:
        """Returns whether every run that has had a slot has ended, and there was one."""
        known = [record for record in self if record.had_slot]
        return bool(known) and all(
            record.ended is not None or now >= record.orchestrator.bye_deadline for record in known
        )

    def all_evicted(self) -> bool:
        """Returns whether every run that has had a slot was evicted, and there was one."""
        known = [record for record in self if record.had_slot]
        return bool(known) and all(record.ended is RunStage.EVICTED for record in known)

    # --- how records change ---

    def _record(self, run_id: str) -> RunRecord:
        return self._records.setdefault(run_id, RunRecord(run_id))

    def _put(self, run: Run) -> Run:
        record = self._records[run.run_id]
        assert run.slot not in self._slots, f"slot {run.slot} is taken"
        assert 0 <= run.slot < self.max_runs, f"slot {run.slot} of {self.max_runs}"
        self._move(record, RunStage.ADMITTED)
        record.run = run
        self._slots[run.slot] = record
        return run

    def _move(self, record: RunRecord, stage: RunStage) -> None:
        assert stage in TRANSITIONS[record.stage], f"run {record.run_id} cannot go from {record.stage} to {stage}"
        record.stage = stage

    def _settle(self, record: RunRecord) -> None:
        """Moves a run without a slot to the stage that its directory stands for."""
        if record.run is not None:
            return
        if record.eviction is not None:
            self._move(record, RunStage.EVICTED)
        elif record.refusal is not None:
            self._move(record, RunStage.REFUSED)
        elif record.config is not None:
            self._move(record, RunStage.WAITING)
        elif record.ended is RunStage.DELETED and record.found is None:
            self._move(record, RunStage.DELETED)
            record.directory = None
        else:
            self._move(record, RunStage.SEEN)
        self._forget_stranger(record)

    def _forget_stranger(self, record: RunRecord) -> None:
        """Removes the record of a run without directory, connection and past: any number of names may connect once."""
        orchestrator = record.orchestrator
        known = record.found is not None or record.run is not None or record.had_slot
        if not (known or orchestrator.connected or orchestrator.unanswered_since is not None):
            self._records.pop(record.run_id, None)


def _is_renewed(record: RunRecord) -> bool:
    """Returns whether a run in a slot is admitted anew.

    It is leaving although it may stay, or it is another run of the same name, or its configuration has changed in what the
    trainer uses.
    """
    run, config, checked = record.run, record.config, record.checked
    assert run is not None
    assert run.admitted_with is not None
    assert config is not None
    assert checked is not None
    return (
        record.stage is RunStage.LEAVING
        or checked.directory != run.directory
        or _used(config) != _used(run.admitted_with)
    )


def _used(config: TrainedRun) -> tuple[object, ...]:
    """Returns the parts of a configuration that the trainer uses."""
    return config.steps, config.training, config.trainer_timeout_seconds
