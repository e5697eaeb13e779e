"""Trackio's database on this machine. A row is one transaction, and the database says which steps it has."""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from counterpoint.job.reading.redaction import whole_configuration
from counterpoint.job.tracking.rows import Evaluation, Row, Target

logger = logging.getLogger(__name__)


class TrackioSink:
    """A `job.tracking.rows.Sink`."""

    def __init__(self, target: Target) -> None:
        directory = Path(target.options.get("directory") or target.directory)
        directory.mkdir(parents=True, exist_ok=True)
        os.environ["TRACKIO_DIR"] = str(directory)  # read when the package is imported; this process is its only user
        from trackio.sqlite_storage import SQLiteStorage

        self._storage: Any = SQLiteStorage
        self._target = target
        self._project = target.options.get("project") or "counterpoint"
        self._last: dict[str, int] = {}
        self._evaluated: dict[str, set[tuple[str, int]]] = {}

    def last_step(self, run_id: str) -> int:
        """See `Sink`."""
        if run_id not in self._last:
            logs = self._storage.get_logs(self._project, self._name(run_id), run_id=self._id(run_id))
            self._last[run_id] = max((log["step"] for log in logs if "tracking/time" in log), default=0)
            self._evaluated[run_id] = {(name, log["step"]) for log in logs for name in log}
        return self._last[run_id]

    def write(self, row: Row) -> None:
        """See `Sink`."""
        self._log(row.run_id, row.values | {"tracking/time": row.time}, row.step, row.time)
        self._last[row.run_id] = row.step

    def write_evaluation(self, result: Evaluation) -> None:
        """See `Sink`. One that it has already is left out."""
        had = self._evaluated[result.run_id]
        new = {name: value for name, value in result.values.items() if (name, result.step) not in had}
        if new:
            self._log(result.run_id, new, result.step, result.time)
            had.update((name, result.step) for name in new)

    def rewind(self, run_id: str, step: int) -> bool:
        """See `Sink`: it keeps what it has of those steps."""
        return False

    def flush(self) -> None:
        """See `Sink`: every row was a transaction."""

    def close(self) -> None:
        """See `Sink`."""

    def _log(self, run_id: str, values: dict[str, float], step: int, time: float) -> None:
        first = not self._last.get(run_id)
        config = self._configuration(run_id) if first else None
        at = datetime.fromtimestamp(time, UTC).isoformat()
        self._storage.bulk_log(
            self._project,
            self._name(run_id),
            [values],
            steps=[step],
            timestamps=[at],
            config=config,
            run_id=self._id(run_id),
        )

    def _configuration(self, run_id: str) -> dict[str, Any]:
        return whole_configuration(self._target.job, run_id) | {"_Group": self._target.group}

    def _name(self, run_id: str) -> str:
        return f"{self._target.group}.{run_id}"

    def _id(self, run_id: str) -> str:
        return f"{self._target.identity}-{run_id}"
