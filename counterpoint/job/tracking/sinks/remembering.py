"""What TensorBoard's and Trackio's sinks share: they know which rows and results a run has there, and leave out those."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

from counterpoint.job.tracking.rows import Evaluation, Row

_ROW_MARK = "tracking/time"
"""A value that only rows have, so that the last row can be told from an evaluation."""


class RememberingSink(ABC):
    """The part of a `job.tracking.rows.Sink` that writes each row and each result once."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._evaluated: dict[str, set[tuple[str, int]]] = {}

    @abstractmethod
    def kept(self, run_id: str) -> Mapping[int, Collection[str]]:
        """Returns the names of the values that the system has of a run, by step."""

    @abstractmethod
    def put(self, run_id: str, values: dict[str, float], step: int, time: float) -> None:
        """Adds values."""

    def last_step(self, run_id: str) -> int:
        """See `Sink`."""
        if run_id not in self._last:
            kept = self.kept(run_id)
            self._last[run_id] = max((step for step, names in kept.items() if _ROW_MARK in names), default=0)
            self._evaluated[run_id] = {(name, step) for step, names in kept.items() for name in names}
        return self._last[run_id]

    def write(self, row: Row) -> None:
        """See `Sink`."""
        self.put(row.run_id, row.values | {_ROW_MARK: row.time}, row.step, row.time)
        self._last[row.run_id] = row.step

    def write_evaluation(self, result: Evaluation) -> None:
        """See `Sink`. One that it has already is left out."""
        had = self._evaluated[result.run_id]
        new = {name: value for name, value in result.values.items() if (name, result.step) not in had}
        if new:
            had.update((name, result.step) for name in new)
            self.put(result.run_id, new, result.step, result.time)
