"""`processes.json`: the state of a job's workers, written by their supervisor, read by `status` and `stop`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.worker_view import State, WorkerView
from job.directory import read_json
from transport.files.atomic import write_atomically

PROCESSES_FILE = "processes.json"


class ProcessesFile:
    """The file of one job. It is written only if its content has changed."""

    def __init__(self, directory: Path) -> None:
        """`directory` is the job's."""
        self.path = directory / PROCESSES_FILE
        self._written = b""

    def write(self, state: State, workers: Sequence[WorkerView]) -> None:
        """Writes the state of the job and of its workers. Raises `OSError`; the next call then tries again."""
        content = json.dumps({"job": state, "workers": [asdict(worker) for worker in workers]}, indent=2).encode()
        if content != self._written:
            write_atomically(self.path, content)
            self._written = content


def read_workers(directory: Path) -> list[dict[str, Any]]:
    """Returns the workers' fields (those of `WorkerView`); empty without the file. Raises `UserError` for a damaged file."""
    path = directory / PROCESSES_FILE
    workers: list[dict[str, Any]] = read_json(path)["workers"] if path.exists() else []
    return workers


def was_stopping(directory: Path) -> bool:
    """Whether the job was being stopped when its state was last written. Raises `UserError` for a damaged file."""
    path = directory / PROCESSES_FILE
    return path.exists() and read_json(path)["job"] not in (State.WAITING, State.STARTING, State.RUNNING)
