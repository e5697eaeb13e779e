"""What a backend is told of a job: its bundles, and the order for one worker's process, from the spec and the state."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from counterpoint.cluster.backends.base import Bundle
from counterpoint.cluster.backends.order import WorkerOrder
from counterpoint.cluster.manager.starting import needs_of
from counterpoint.cluster.manager.state import BundleRecord, WorkerRecord
from counterpoint.cluster.spec import LONGEST_PERIOD_SECONDS, MASTER, JobSpec, role_of

LOGS = "logs"
"""The folder of the workers' output, in the job's directory."""

COMMAND = (sys.executable, "-P", "-m", "counterpoint.cluster.worker_process")
"""The command of every worker of a class."""


def log_file(spec: JobSpec, directory: Path, worker: str) -> Path:
    """Returns where a worker's output is appended. Raises `KeyError` for a role that the job does not have."""
    role = spec.role(role_of(worker))
    return role.log_of(worker) or directory / LOGS / f"{worker}.log"


class Orders:
    """Makes the orders of one job."""

    def __init__(self, spec: JobSpec, directory: Path, path: Sequence[str] = ()) -> None:
        """`path`: directories that are searched for the workers' classes before all others."""
        self.spec, self._directory, self._path = spec, directory, tuple(path)

    def bundle(self, record: BundleRecord) -> Bundle:
        """Returns a bundle with what each of its workers needs."""
        return Bundle(record.name, {name: needs_of(self.spec, name) for name in record.workers})

    def order(self, record: WorkerRecord, incarnation: int, again: bool, count: int) -> WorkerOrder:
        """Returns the order for a worker's process. `count`: workers of its role now."""
        role = self.spec.role(record.role)
        description = description_of(self.spec, record.name, incarnation, count, self._directory, self._path)
        if description:
            command: tuple[str, ...] = COMMAND
        else:
            assert role.command is not None
            command = (*role.command, *(role.restart_arguments if again else ()))
        return WorkerOrder(
            worker=record.name,
            incarnation=incarnation,
            bundle=record.bundle,
            command=command,
            environment=dict(role.environment),
            log_file=str(log_file(self.spec, self._directory, record.name)),
            nice=role.nice,
            notifies=bool(description) or role.ready_timeout_seconds is not None,
            silence_timeout_seconds=role.silence_timeout_seconds,
            stop_timeout_seconds=role.stop_timeout_seconds,
            description=description,
        )


def description_of(
    job: JobSpec, worker: str, incarnation: int, count: int, directory: Path, path: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns what a worker or SubMaster reads as its `Description`, as JSON values; empty for a worker that is a command.

    `count`: workers of its role now. `path`: as of `Orders`.
    """
    role = job.role(role_of(worker))
    rank = worker.rpartition("-")[2]
    import_path = role.sub_master if rank == MASTER else role.worker
    if import_path is None:
        return {}
    return {
        "job": job.name,
        "role": role.name,
        "rank": -1 if rank == MASTER else int(rank),
        "count": count,
        "fewest": role.fewest,
        "most": role.most,
        "worker": worker,
        "incarnation": incarnation,
        "import_path": import_path,
        "config": role.model_dump(mode="json", include={"config"})["config"],
        "directory": str(directory),
        "task": role.task and rank != MASTER,
        "heartbeat_seconds": role.heartbeat_seconds or LONGEST_PERIOD_SECONDS,
        "path": list(path),
    }
