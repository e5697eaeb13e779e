"""The state of a job and of its workers, as its master answers it and its outcome keeps it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from counterpoint.cluster.backends.base import WorkerHeartbeat
from counterpoint.cluster.manager.ending import words_of
from counterpoint.cluster.manager.events import Outcome, WorkerExited
from counterpoint.cluster.manager.state import WorkerRecord


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker, for a person."""

    worker: str
    role: str
    rank: int
    """-1 for a SubMaster."""
    stage: str
    phase: str
    """Its phase, which is more detailed than its stage."""
    incarnation: int
    node: str
    pid: int
    address: str
    restarts: int
    last_death: str
    status: str
    """What it says of itself."""
    trouble: str
    """What is wrong with it while it lives; empty if nothing is."""
    log: str
    """The path of its output."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job, for a person."""

    job: str
    stage: str
    epoch: int
    """The number of its present master; each has a higher one."""
    trouble: str = ""
    """Why the master does not act, or which task has failed while others go on; empty if nothing is wrong."""
    workers: tuple[WorkerStatus, ...] = ()
    outcome: Outcome | None = None
    """None while the job has not ended."""

    def as_json(self) -> dict[str, Any]:
        """Returns the status as JSON values."""
        return asdict(self)


def worker_status(
    record: WorkerRecord, log: Path, beat: WorkerHeartbeat | None = None, ended: WorkerExited | None = None
) -> WorkerStatus:
    """Returns a worker's status by its record, its last heartbeat, and an end of its process that nothing was decided about.

    Those of another incarnation do not count.
    """
    if beat is not None and beat.incarnation != record.incarnation:
        beat = None
    trouble = "suspected: heartbeats are missing" if record.suspected else ""
    if ended is not None and ended.incarnation == record.incarnation:
        trouble = f"{words_of(ended)}; what follows is decided once the job's state can be written"
    elif beat is not None and beat.trouble:
        trouble = beat.trouble
    return WorkerStatus(
        worker=record.name,
        role=record.role,
        rank=record.rank,
        stage=str(record.stage),
        phase=str(record.phase),
        incarnation=record.incarnation,
        node=record.node,
        pid=beat.pid if beat is not None and beat.pid else record.pid,
        address=record.address,
        restarts=record.restarts,
        last_death=record.last_death,
        status="" if beat is None else beat.status,
        trouble=trouble,
        log=str(log),
    )
