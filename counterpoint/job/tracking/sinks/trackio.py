"""Trackio's database on this machine. A row is one transaction under an id of its own: one that is there is not added again."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from counterpoint.job.reading.redaction import whole_configuration
from counterpoint.job.tracking.rows import Evaluation, Sink, SinkSpec, TrackedRow


class TrackioSink(Sink):
    """Writes into the database. It keeps the first values of steps that are trained again."""

    def __init__(self, spec: SinkSpec, identity: str) -> None:
        directory = Path(spec.options.get("directory") or spec.directory)
        directory.mkdir(parents=True, exist_ok=True)
        os.environ["TRACKIO_DIR"] = str(directory)  # read when the package is imported; this process is its only user
        from trackio.sqlite_storage import SQLiteStorage

        self._storage: Any = SQLiteStorage
        self._spec, self._identity = spec, identity
        self._project = spec.options.get("project") or "counterpoint"

    def last_step(self, run_id: str, saved: int) -> int:
        """See `Sink`: the database may be a new one."""
        name, identity = self._names(run_id)
        return 0 if self._storage.get_last_step(self._project, name, run_id=identity) is None else saved

    def write(self, row: TrackedRow) -> None:
        """See `Sink`."""
        self._put(row.run_id, "row", row.values, row.step, row.time)

    def write_evaluation(self, result: Evaluation) -> None:
        """See `Sink`."""
        self._put(result.run_id, result.name, result.values, result.step, result.time)

    def _put(self, run_id: str, kind: str, values: dict[str, float], step: int, time: float) -> None:
        """Adds values, and the run's configuration before its first."""
        name, identity = self._names(run_id)
        is_first = self._storage.get_last_step(self._project, name, run_id=identity) is None
        self._storage.bulk_log(
            self._project,
            name,
            [values],
            steps=[step],
            timestamps=[datetime.fromtimestamp(time, UTC).isoformat()],
            config=whole_configuration(self._spec.job, run_id) | {"_Group": self._spec.group} if is_first else None,
            log_ids=[f"{identity}/{kind}/{step}"],
            run_id=identity,
        )

    def _names(self, run_id: str) -> tuple[str, str]:
        """Returns the run's name there, and its id."""
        return f"{self._spec.group}.{run_id}", f"{self._identity}-{run_id}"
