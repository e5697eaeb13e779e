"""`processes.json`: the state of a job's workers, written by their supervisor, read by `status` and `stop`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.job.directory import MAX_JOB_BYTES, read_as
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

PROCESSES_FILE = "processes.json"


@dataclass(frozen=True, slots=True)
class _Recorded(WorkerView):
    """A worker as it was recorded."""

    log_from: Annotated[int, Field(ge=0, lt=2**63)] | None = 0
    """A file of an earlier version does not have it: all of the log is the worker's then."""


class _Content(BaseModel):
    """What the file holds."""

    job: State
    workers: list[_Recorded]


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
    content = _read(directory)
    return [] if content is None else [asdict(worker) for worker in content.workers]


def read_leniently(directory: Path) -> tuple[str, list[dict[str, Any]]]:
    """Returns the job's state, and the workers that have a name, of a file that anybody may have written.

    Any other value may be anything. Nothing of a file that is missing or damaged.
    """
    try:
        content = read_json(directory / PROCESSES_FILE, MAX_JOB_BYTES)
    except (OSError, UntrustedFileError):
        return "", []
    listed = content.get("workers")
    workers = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    return str(content.get("job", "")), [each for each in workers if isinstance(each.get("name"), str)]


def was_stopping(directory: Path) -> bool:
    """Whether the job was being stopped when its state was last written. Raises `UserError` for a damaged file."""
    content = _read(directory)
    return content is not None and content.job not in (State.WAITING, State.STARTING, State.RUNNING)


def _read(directory: Path) -> _Content | None:
    path = directory / PROCESSES_FILE
    return read_as(_Content, path, "remove it: a job that runs writes it anew") if path.exists() else None
