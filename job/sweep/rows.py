"""A sweep's targets as rows: what the store says of each, and what its runs have come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from job.sweep.result import Result, result_of
from job.sweep.targets import SweepConfig, Target
from sweep.status import TargetStatus, sweep_status


@dataclass(frozen=True, slots=True)
class Row:
    """One target as it stands."""

    status: TargetStatus
    result: Result | None
    """None where the sweep's file is not known."""
    values: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        runs = None if self.result is None else [asdict(run) for run in self.result.runs]
        return {**asdict(self.status), "values": self.values, "runs": runs}


def looking(config: SweepConfig, targets: Sequence[Target]) -> Callable[[], list[Row]]:
    """What looks at a sweep whose file is known. It lists targets that its file has no longer, too."""
    known = {target.target_id: target for target in targets}

    def look() -> list[Row]:
        statuses = {status.target_id: status for status in sweep_status(config.store, known)}
        order = [*known, *(target_id for target_id in statuses if target_id not in known)]
        return [row_of_target(statuses[target_id], known.get(target_id)) for target_id in order]

    return look


def row_of_target(status: TargetStatus, target: Target | None) -> Row:
    return Row(status, None if target is None else result_of(target), {} if target is None else target.values)
