"""TensorBoard's files, a folder for each run. A step is one record of a file: a kill leaves the whole step or nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterpoint.job.tracking.event_files import library, open_writer, read_scalars
from counterpoint.job.tracking.rows import Evaluation, Row, Target

_ROW_MARK = "tracking/time"
"""A scalar that only rows have, so that the last row can be told from an evaluation."""


class TensorboardSink:
    """A `job.tracking.rows.Sink`. What the trainer trains again replaces what was there."""

    def __init__(self, target: Target) -> None:
        self._directory = Path(target.options.get("directory") or target.directory)
        self._writers: dict[str, Any] = {}
        self._last: dict[str, int] = {}
        self._evaluated: dict[str, set[tuple[str, int]]] = {}

    def last_step(self, run_id: str) -> int:
        """See `Sink`."""
        if run_id not in self._last:
            shown = read_scalars(self._directory / run_id) if (self._directory / run_id).is_dir() else {}
            self._last[run_id] = max((step for step, values in shown.items() if _ROW_MARK in values), default=0)
            self._evaluated[run_id] = {(name, step) for step, values in shown.items() for name in values}
        return self._last[run_id]

    def write(self, row: Row) -> None:
        """See `Sink`."""
        self._add(row.run_id, row.values | {_ROW_MARK: row.time}, row.step, row.time)
        self._last[row.run_id] = row.step

    def write_evaluation(self, result: Evaluation) -> None:
        """See `Sink`. One that it has already is left out."""
        had = self._evaluated[result.run_id]
        new = {name: value for name, value in result.values.items() if (name, result.step) not in had}
        if new:
            had.update((name, result.step) for name in new)
            self._add(result.run_id, new, result.step, result.time)

    def rewind(self, run_id: str, step: int) -> bool:
        """See `Sink`: the next file replaces the older ones from this step on."""
        if (writer := self._writers.pop(run_id, None)) is not None:
            writer.close()
        self._last[run_id] = step - 1
        self._evaluated[run_id] = {each for each in self._evaluated[run_id] if each[1] < step}
        return True

    def flush(self) -> None:
        """See `Sink`."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """See `Sink`."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _add(self, run_id: str, values: dict[str, float], step: int, time: float) -> None:
        library()
        from tensorboardX.proto.summary_pb2 import Summary

        if run_id not in self._writers:
            self._writers[run_id] = open_writer(self._directory / run_id, self.last_step(run_id) + 1)
        items = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writers[run_id].file_writer.add_summary(Summary(value=items), step, time)
