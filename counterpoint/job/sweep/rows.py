"""A sweep's targets as rows: the state of each in the store, and the progress of its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from counterpoint.job.configuration.load import load
from counterpoint.job.sweep.result import TargetResult, result_of
from counterpoint.job.sweep.targets import SweepConfig, Target, targets_of
from counterpoint.sweep.status import TargetStatus, sweep_status
from counterpoint.sweep.store import UnsafeStoreError
from counterpoint.transport.errors import UserError

SETTLED = frozenset({"SUCCESS", "FAILED", "UNREADABLE"})
"""The states that no worker changes."""

ReadRows = Callable[[], "list[TargetRow]"]
"""Reads the present rows of a sweep. Raises `OSError` if the storage or a run's directory cannot be read."""


@dataclass(frozen=True, slots=True)
class TargetRow:
    """One target at the time of reading."""

    status: TargetStatus
    result: TargetResult | None
    """None if the sweep's file is not known."""
    values: dict[str, Any]
    """The values that the target sets, by dotted path; empty if the sweep's file is not known."""

    @property
    def is_settled(self) -> bool:
        """Whether no worker will change the target's state."""
        return self.status.state in SETTLED

    def as_json(self) -> dict[str, Any]:
        """Returns the row for programs."""
        runs = None if self.result is None else [asdict(run) for run in self.result.runs]
        return {**asdict(self.status), "values": self.values, "runs": runs}


def rows_reader(where: str) -> ReadRows:
    """Returns what reads the rows of the sweep at `where`: the sweep's file, or its root with its name.

    Raises `UserError` if no sweep is there.
    """
    if Path(where).is_file():
        config = load(SweepConfig, Path(where), [])
        return rows_reader_of(config, targets_of(config, Path(where)))
    try:
        if not sweep_status(where):
            raise UserError(
                f"{where}: no target was ever claimed there; expected a sweep's file, or its `root` with its name"
            )
    except (UnsafeStoreError, ValueError, ImportError) as error:
        raise UserError(f"{where}: {error}") from None
    return lambda: [row_of(status, None) for status in sweep_status(where)]


def rows_reader_of(config: SweepConfig, targets: Sequence[Target]) -> ReadRows:
    """Returns what reads the rows of a sweep whose file is known. Targets that the file no longer has come last."""
    known = {target.target_id: target for target in targets}

    def read() -> list[TargetRow]:
        statuses = {status.target_id: status for status in sweep_status(config.store, known)}
        order = [*known, *(target_id for target_id in statuses if target_id not in known)]
        return [row_of(statuses[target_id], known.get(target_id)) for target_id in order]

    return read


def row_of(status: TargetStatus, target: Target | None) -> TargetRow:
    """Returns the row of a target; of one that succeeded and whose output was deleted, `error` says so."""
    if target is None:
        return TargetRow(status, None, {})
    gone = target.missing_output() if status.state == "SUCCESS" else None
    return TargetRow(status if gone is None else replace(status, error=gone), result_of(target), target.values)
