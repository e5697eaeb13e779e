"""A sweep from its place: the folder with its targets' records, or its file, which also says what each target sets.

A record alone does not say which values its target has, nor where its run is: give `serve` the sweep's file for those. The folder
is read without its locks, file by file; what is no record of a target is passed over.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from counterpoint.job.reading.rollouts.rollout_records import finite_number
from counterpoint.job.reading.rollouts.view import shown_value
from counterpoint.job.sweep.result import RunResult
from counterpoint.job.sweep.rows import TargetRow, rows_reader
from counterpoint.sweep.record import LARGEST_BYTES, Record, RecordError, checked_id
from counterpoint.sweep.status import TargetStatus, status_of
from counterpoint.sweep.store import StoreError, UnsafeStoreError
from counterpoint.transport.config import Config
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.untrusted import UntrustedFileError, read_bytes, read_toml
from counterpoint.transport.printable import printable

MOST_TARGETS = 5_000
"""Targets that are read."""

SUFFIX = ".json"
LOOKED_AT = 50
"""Files that are looked at to tell whether a folder is a sweep's."""

MOST_KEYS = 32

SECTIONS = frozenset({"root", "name"})
"""Keys that a sweep's file must have, and a job's has not."""


class TargetRun(Config):
    """One run of a target."""

    run_id: str
    """The run's id."""
    step: int
    """The newest step that has shipped; 0 before the first."""
    steps: int | None
    """The configured number of steps; None before it has begun."""
    reward: float | None
    """The mean of its last steps."""


class TargetEntry(Config):
    """One target."""

    target: str
    """The id of the target."""
    state: str
    """PENDING, RUNNING, SUCCESS, FAILED, INTERRUPTED or UNREADABLE."""
    is_lost: bool
    """It is RUNNING by its record, and its last heartbeat is older than its lease: its worker is gone, if the clocks agree."""
    owner: str
    """The worker that holds it or held it last, as `host, process`; empty if none did."""
    attempts: int
    """How often it was tried, without attempts that were given back."""
    claims: int
    """How often it was claimed."""
    started: float | None
    """The time when it was claimed last, in seconds since 1970."""
    finished: float | None
    """The time when that ended, in seconds since 1970."""
    seconds: float | None
    """The seconds from the claim to its end, or to its last heartbeat."""
    error: str
    """The error of the last attempt that did not succeed; empty without one."""
    texts: list[str]
    """What it sets, as text, by the order of `keys`."""
    numbers: list[float | None]
    """The same as numbers; None where it is none."""
    reward: float | None
    """The mean reward of its runs' last steps."""
    runs: list[TargetRun]
    """Its runs, at most 16."""


class SweepAnswer(Config):
    """A sweep."""

    keys: list[str]
    """The keys that its targets set; empty if its file was not given."""
    knows_values: bool
    """Whether its file was given: values and results are known only then."""
    targets: list[TargetEntry]
    """Its targets, at most 5,000."""
    left_out: int
    """How many more there are."""
    problem: str
    """Why it cannot be read; empty if it can."""


def is_sweep(path: Path) -> bool:
    """Whether there is a sweep's file, or a folder with a target's record. Raises `OSError`."""
    if path.is_file():
        return path.suffix == ".toml" and _is_sweep_file(path)
    return any(_status_in(path, name).state != "UNREADABLE" for name in _record_names(path)[:LOOKED_AT])


class SweepReader:
    """Reads one sweep. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[int, Callable[[], list[TargetRow]]] | None = None
        """The time of the sweep's file, and what reads the rows of its targets."""

    def read(self) -> SweepAnswer:
        """Reads every target."""
        if not self._path.is_file():
            names = _record_names(self._path)
            rows = [TargetRow(_status_in(self._path, name), None, {}) for name in names[:MOST_TARGETS]]
            return _answer(rows, len(names), knows_values=False)
        try:
            rows = self._rows_of_file()
        except (UserError, StoreError, UnsafeStoreError, OSError, ValueError, ImportError) as error:
            return _answer([], 0, knows_values=True, problem=str(error))
        return _answer(rows[:MOST_TARGETS], len(rows), knows_values=True)

    def _rows_of_file(self) -> list[TargetRow]:
        modified = self._path.stat().st_mtime_ns
        if self._read is None or self._read[0] != modified:
            self._read = modified, rows_reader(str(self._path))
        return self._read[1]()


def _answer(rows: list[TargetRow], count: int, *, knows_values: bool, problem: str = "") -> SweepAnswer:
    """Returns the sweep; `count` is the number of its targets, of which `rows` has those that are shown."""
    keys = sorted({key for row in rows for key in row.values})[:MOST_KEYS]
    return SweepAnswer(
        keys=[printable(key[:200]) for key in keys],
        knows_values=knows_values,
        targets=[_entry(row, keys) for row in rows],
        left_out=count - len(rows),
        problem=printable(problem[:1000]),
    )


def _entry(row: TargetRow, keys: list[str]) -> TargetEntry:
    status, values = row.status, [row.values.get(key) for key in keys]
    lease, beat = status.lease_seconds, status.heartbeat_at
    is_lost = status.state == "RUNNING" and lease is not None and beat is not None and time.time() - beat > lease
    runs: list[RunResult] = [] if row.result is None else list(row.result.runs)
    rewards = [run.reward for run in runs if run.reward is not None]
    return TargetEntry(
        target=status.target_id,
        state=status.state,
        is_lost=is_lost,
        owner="" if status.host is None else printable(f"{status.host[:100]}, process {status.pid}"),
        attempts=status.attempts,
        claims=status.token or 0,
        started=status.started_at,
        finished=status.finished_at,
        seconds=status.duration,
        error=printable((status.error or "")[:500]),
        texts=["" if value is None else shown_value(value, 100, indented=False) for value in values],
        numbers=[None if isinstance(value, bool) else finite_number(value) for value in values],
        reward=finite_number(sum(rewards) / len(rewards)) if rewards else None,
        runs=[
            TargetRun(run_id=run.run_id, step=run.step, steps=run.steps, reward=finite_number(run.reward))
            for run in runs[:16]
        ],
    )


def _is_sweep_file(path: Path) -> bool:
    try:
        return read_toml(path, 2**20).keys() >= SECTIONS
    except UntrustedFileError:
        return False


def _record_names(directory: Path) -> list[str]:
    """Returns the ids of which a folder has a file."""
    names = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX):
                try:
                    names.append(checked_id(entry.name.removesuffix(SUFFIX)))
                except ValueError:
                    continue
    return sorted(names)


def _status_in(directory: Path, target_id: str) -> TargetStatus:
    try:
        data = read_bytes(directory / f"{target_id}{SUFFIX}", LARGEST_BYTES)
        return status_of(Record.of_bytes(data, target_id))
    except OSError as error:
        return TargetStatus(target_id, "UNREADABLE", error=error.strerror or "it cannot be read")
    except (RecordError, UntrustedFileError):
        return TargetStatus(target_id, "UNREADABLE", error="this file is not a target's record")
