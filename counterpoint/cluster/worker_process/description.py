"""What a worker's process is told of itself: made by the master for its `WorkerOrder`, read by the process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from counterpoint.cluster.spec import LONGEST_PERIOD_SECONDS, MASTER, ImportPath, JobSpec, role_of
from counterpoint.transport.config import Config

COMMAND = (sys.executable, "-P", "-m", "counterpoint.cluster.worker_process")
"""The command of every worker of a class."""


class Description(Config):
    """All that a worker's process needs."""

    job: str
    role: str
    rank: int
    """-1 for a SubMaster."""
    count: int
    """Workers of its role."""
    fewest: int = 1
    most: int = sys.maxsize
    """How many these may be."""
    worker: str
    incarnation: int
    import_path: ImportPath
    """The import path of its class."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The configuration of its role."""
    directory: str
    """The directory of the job."""
    node: str = ""
    """Filled in by its keeper."""
    listen: str = "ipc"
    """The address at which it takes calls: `ipc`, or `tcp://HOST` with keys. Filled in by its keeper, which listens
    there itself."""
    task: bool = False
    """Whether the process ends once `start` has returned."""
    heartbeat_seconds: float = Field(default=LONGEST_PERIOD_SECONDS, gt=0)
    """Time between two heartbeats."""
    path: tuple[str, ...] = ()
    """Directories that are searched for its class before all others."""


def description_of(
    job: JobSpec, worker: str, incarnation: int, count: int, directory: Path, path: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the description of a worker or SubMaster, as JSON values; empty for a worker that is a command.

    `count`: workers of its role now. `path`: as in `Description`.
    """
    role = job.role(role_of(worker))
    rank = worker.rpartition("-")[2]
    import_path = role.sub_master if rank == MASTER else role.worker
    if import_path is None:
        return {}
    description = Description(
        job=job.name,
        role=role.name,
        rank=-1 if rank == MASTER else int(rank),
        count=count,
        fewest=role.fewest,
        most=role.most,
        worker=worker,
        incarnation=incarnation,
        import_path=import_path,
        config=role.config,
        directory=str(directory),
        task=role.task and rank != MASTER,
        heartbeat_seconds=role.heartbeat_seconds or LONGEST_PERIOD_SECONDS,
        path=tuple(path),
    )
    return description.model_dump(mode="json")
