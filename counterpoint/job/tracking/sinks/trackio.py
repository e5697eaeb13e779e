"""Trackio's database on this machine. A row is one transaction, and the database says which steps it has."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from counterpoint.job.reading.redaction import whole_configuration
from counterpoint.job.tracking.rows import Target
from counterpoint.job.tracking.sinks.remembering import RememberingSink


class TrackioSink(RememberingSink):
    """Writes into the database. It keeps the first values of steps that are trained again."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        directory = Path(target.options.get("directory") or target.directory)
        directory.mkdir(parents=True, exist_ok=True)
        os.environ["TRACKIO_DIR"] = str(directory)  # read when the package is imported; this process is its only user
        from trackio.sqlite_storage import SQLiteStorage

        self._storage: Any = SQLiteStorage
        self._target = target
        self._project = target.options.get("project") or "counterpoint"

    def kept(self, run_id: str) -> dict[int, set[str]]:
        """See `RememberingSink`."""
        kept: dict[int, set[str]] = {}
        name, identity = self._names(run_id)
        for log in self._storage.get_logs(self._project, name, run_id=identity):
            kept.setdefault(log["step"], set()).update(log)
        return kept

    def put(self, run_id: str, values: dict[str, float], step: int, time: float) -> None:
        """See `RememberingSink`: one transaction. The first has the run's configuration."""
        group, job = self._target.group, self._target.job
        config = None if self.last_step(run_id) else whole_configuration(job, run_id) | {"_Group": group}
        at = datetime.fromtimestamp(time, UTC).isoformat()
        name, identity = self._names(run_id)
        self._storage.bulk_log(
            self._project, name, [values], steps=[step], timestamps=[at], config=config, run_id=identity
        )

    def rewind(self, run_id: str, step: int) -> bool:
        """See `Sink`: it keeps what it has of those steps."""
        return False

    def flush(self) -> None:
        """See `Sink`: every row was a transaction."""

    def close(self) -> None:
        """See `Sink`."""

    def _names(self, run_id: str) -> tuple[str, str]:
        """Returns the run's name there, and its id."""
        return f"{self._target.group}.{run_id}", f"{self._target.identity}-{run_id}"
