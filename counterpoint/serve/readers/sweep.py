"""A sweep from its place: the folder with its targets' records, or its file, which also says what each target sets.

A record alone does not say which values its target has, nor where its run is: give `serve` the sweep's file for those. The folder
is read without its locks, file by file; what is no record of a target is passed over.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from counterpoint.job.sweep.result import RunResult
from counterpoint.job.sweep.rows import Row, rows_reader
from counterpoint.sweep.record import LARGEST_BYTES, Record, RecordError, checked_id
from counterpoint.sweep.status import TargetStatus, status_of
from counterpoint.sweep.store import StoreError, UnsafeStoreError
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.untrusted import UntrustedFileError, read_bytes, read_toml

MOST_TARGETS = 5_000
"""Targets that are read."""

SUFFIX = ".json"
LOOKED_AT = 50
"""Files that are looked at to tell whether a folder is a sweep's."""

SECTIONS = frozenset({"root", "name"})
"""Keys that a sweep's file must have, and a job's has not."""


@dataclass(slots=True)
class SweepState:
    """A sweep as it was at one moment."""

    rows: list[Row] = field(default_factory=list)
    knows_values: bool = False
    """Whether its file was given."""
    left_out: int = 0
    """The number of targets beyond `MOST_TARGETS`."""
    problem: str = ""


def is_sweep(path: Path) -> bool:
    """Whether there is a sweep's file, or a folder with a target's record. Raises `OSError`."""
    if path.is_file():
        return path.suffix == ".toml" and _is_sweep_file(path)
    return any(_status_in(path, name).state != "UNREADABLE" for name in _record_names(path)[:LOOKED_AT])


class SweepReader:
    """Reads one sweep. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[int, Callable[[], list[Row]]] | None = None
        """The time of the sweep's file, and what reads the rows of its targets."""

    def read(self) -> SweepState:
        """Reads every target."""
        if not self._path.is_file():
            names = _record_names(self._path)
            rows = [Row(_status_in(self._path, name), None, {}) for name in names[:MOST_TARGETS]]
            return SweepState(rows, left_out=max(0, len(names) - MOST_TARGETS))
        try:
            rows = self._rows_of_file()
        except (UserError, StoreError, UnsafeStoreError, OSError, ValueError, ImportError) as error:
            return SweepState(problem=str(error), knows_values=True)
        return SweepState(rows[:MOST_TARGETS], True, max(0, len(rows) - MOST_TARGETS))

    def _rows_of_file(self) -> list[Row]:
        modified = self._path.stat().st_mtime_ns
        if self._read is None or self._read[0] != modified:
            self._read = modified, rows_reader(str(self._path))
        return self._read[1]()


def reward_of(row: Row) -> float | None:
    """Returns a target's reward: the mean of its runs'; None before the first."""
    runs: list[RunResult] = [] if row.result is None else list(row.result.runs)
    rewards = [run.reward for run in runs if run.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


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
