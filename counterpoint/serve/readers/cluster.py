"""A job of roles as the fold of its journal: its workers, and what has changed of late.

Reads jobs of `submit`, and any job's `control/`.

The journal's objects are read as files, without a lock, so its master never waits for us; the state is what the master had when
it appended the last of them. Each look folds only the entries that are new. Entries that a snapshot has replaced are gone: then
the state begins anew from the snapshot, and the changes between the two are not known.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.job_files import JOURNAL, JobFile, OutcomeFile, holds_job, read_job, read_outcome
from counterpoint.cluster.manager.manager import PrimeManager
from counterpoint.cluster.manager.state import WorkerRecord
from counterpoint.cluster.master.event_codec import UnknownEvent, decode
from counterpoint.cluster.master.journal_format import (
    SNAPSHOT,
    JournalError,
    entry_key,
    entry_of_bytes,
    number_of,
    snapshot_key,
    snapshot_of_bytes,
)
from counterpoint.job.directory import control_directory
from counterpoint.job.inspection.rollout_records import finite_number
from counterpoint.job.processes_file import PROCESSES_FILE
from counterpoint.serve.readers.rollouts.view import name_of
from counterpoint.sweep.store import LARGEST_OBJECT_BYTES
from counterpoint.transport.files.untrusted import UntrustedFileError, read_bytes, read_json

MOST_CHANGES = 500
"""Changes that are kept, the newest."""

SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Change:
    """A worker, or the job, went from one state to another."""

    time: float
    """The time when the journal's entry was written, in seconds since 1970."""
    worker: str
    """Empty for the job as a whole."""
    before: str
    """Empty for a worker that is new."""
    after: str
    incarnation: int
    node: str
    cause: str
    """The event that led to it, in words."""
    reason: str
    """How the worker died, or why the job ends; empty for others."""


@dataclass(slots=True)
class ClusterState:
    """A job of roles at one moment."""

    job: JobFile | None = None
    manager: PrimeManager | None = None
    """None before its journal has begun."""
    changes: list[Change] = field(default_factory=list)
    """The changes, the newest last."""
    entries: int = 0
    """The number of the journal's last entry that was read."""
    written: float | None = None
    """The time when that was written."""
    epoch: int = 0
    """The epoch of the master that wrote it."""
    outcome: OutcomeFile | None = None
    is_complete: bool = True
    """Whether all entries were read; a later look goes on."""
    problem: str = ""


def cluster_directory(directory: Path) -> Path | None:
    """Returns where a directory has the files of a job of roles: itself, or its `control/`; None if it has none."""
    for place in (directory, control_directory(directory)):
        if stat.S_ISDIR(_mode(place)) and holds_job(place):
            return place
    return None


class ClusterReader:
    """Follows one job of roles. Not for several threads at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._begin(None)

    def _begin(self, identity: tuple[int, int] | None) -> None:
        self._identity = identity
        self._manager: PrimeManager | None = None
        self._last = 0
        self._epoch = 0
        self._written: float | None = None
        self._changes: deque[Change] = deque(maxlen=MOST_CHANGES)

    def read(self, until: float) -> ClusterState:
        """Folds what is new, until the moment `until` of `time.monotonic`.

        Damage is told in `problem`; what was folded before it stays.
        """
        place = cluster_directory(self._directory)
        if place is None:
            return ClusterState(problem="the job has no journal (yet)")
        try:
            job = read_job(place)
        except ClusterError:
            return ClusterState(problem="the job's file cannot be read")
        if job.journal is not None:
            return ClusterState(job, problem="the job's journal is in a storage of its own; ask `counterpoint status`")
        problem, complete = "", True
        try:
            identity = _identity_of(place / JOURNAL)
            if identity != self._identity:
                self._begin(identity)
            complete = self._fold(place / JOURNAL, job, until)
        except (JournalError, UnknownEvent, UntrustedFileError, OSError, KeyError, TypeError, ValueError) as error:
            problem = f"the journal cannot be read on from entry {self._last + 1}: {type(error).__name__}"
        return ClusterState(
            job,
            self._manager,
            list(self._changes),
            self._last,
            self._written,
            self._epoch,
            _outcome_in(place),
            complete,
            problem,
        )

    def _fold(self, journal: Path, job: JobFile, until: float) -> bool:
        """Folds the entries after the last one; returns whether there are no more."""
        if self._manager is None:
            self._manager = PrimeManager(job.spec, None)
        while self._fold_next(journal) or self._begin_from_snapshot(journal, job):
            if time.monotonic() >= until:
                return False
        return True

    def _fold_next(self, journal: Path) -> bool:
        assert self._manager is not None
        try:
            data, written = _read(journal / f"{entry_key(self._last + 1)}{SUFFIX}")
        except FileNotFoundError:
            return False
        entry = entry_of_bytes(data, self._last + 1, "the journal")
        for event in [decode(event) for event in entry.events]:  # all of them or none
            before = _looks(self._manager)
            self._manager.handle(event)
            self._note(before, in_words(type(event).__name__), getattr(event, "reason", ""), written)
        self._last, self._epoch, self._written = entry.number, entry.epoch, written
        return True

    def _begin_from_snapshot(self, journal: Path, job: JobFile) -> bool:
        """Begins anew from the newest snapshot if it is later than what was read; returns whether it is."""
        numbers = [number_of(name.removesuffix(SUFFIX), SNAPSHOT) for name in os.listdir(journal)]
        newest = max((number for number in numbers if number is not None), default=0)
        if newest <= self._last:
            return False
        data, written = _read(journal / f"{snapshot_key(newest)}{SUFFIX}")
        snapshot = snapshot_of_bytes(data, newest, "the journal")
        self._manager = PrimeManager(job.spec, snapshot.state["manager"])
        self._last, self._epoch, self._written = newest, snapshot.epoch, written
        return True

    def _note(self, before: dict[str, tuple[str, int, str]], cause: str, reason: str, written: float) -> None:
        assert self._manager is not None
        for name, (phase, incarnation, node) in _looks(self._manager).items():
            was = before.get(name, ("", 0, ""))
            if was[:2] != (phase, incarnation):
                record = self._manager.state.workers.get(name)
                why = reason or (record.last_death if record is not None and phase in _DEATHS else "")
                self._changes.append(Change(written, name, was[0], phase, incarnation, node, cause, why))


_DEATHS = frozenset({"restarting", "held", "failed"})
"""Phases in which the last death is the reason."""


def in_words(name: str) -> str:
    """Returns the name of a kind of event in words: `WorkerExited` as `worker exited`."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()


def workers_of(state: ClusterState) -> list[WorkerRecord]:
    """Returns the records of all workers, in the order of their roles."""
    return [] if state.manager is None else list(state.manager.state.workers.values())


def _looks(manager: PrimeManager) -> dict[str, tuple[str, int, str]]:
    """Returns the phase, incarnation and node of every worker, and the stage of the job under the empty name."""
    looks = {name: (str(one.phase), one.incarnation, one.node) for name, one in manager.state.workers.items()}
    return {"": (str(manager.stage), 0, "")} | looks


def _read(path: Path) -> tuple[bytes, float]:
    data = read_bytes(path, LARGEST_OBJECT_BYTES)
    return data, path.lstat().st_mtime


def _outcome_in(place: Path) -> OutcomeFile | None:
    try:
        return read_outcome(place)
    except ClusterError:
        return None


def _identity_of(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Said:
    """What one worker says."""

    status: str = ""
    trouble: str = ""
    since: float | None = None
    pid: int = 0


def said_by_workers(directory: Path) -> dict[str, Said]:
    """Returns what each worker says, by the name that people see; empty without the file, or for a damaged one."""
    try:
        workers = read_json(directory / PROCESSES_FILE, MAX_BYTES).get("workers")
    except (OSError, UntrustedFileError):
        return {}
    known = [worker for worker in workers if isinstance(worker, dict)] if isinstance(workers, list) else []
    return {
        name: Said(
            name_of(worker.get("status")),
            name_of(worker.get("trouble")),
            finite_number(worker.get("since")),
            pid if type(pid := worker.get("pid")) is int and 0 < pid < 2**31 else 0,
        )
        for worker in known
        if isinstance(name := worker.get("name"), str)
    }
