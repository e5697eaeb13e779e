"""`/jobs/{job}/cluster`: the roles and workers of a job, where they are, and what has changed of late."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from counterpoint.cluster.attended.views import shown_name
from counterpoint.cluster.state_file import StateChange, WorkerRecord
from counterpoint.job.processes_file import read_leniently
from counterpoint.job.reading.cluster import ClusterReader, ClusterState, cluster_directory
from counterpoint.job.reading.rollouts.rollout_records import finite_number
from counterpoint.job.reading.rollouts.view import name_of
from counterpoint.serve.api.population import JobParameters
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.errors import NotFound
from counterpoint.serve.jobs import Job, Jobs
from counterpoint.transport.config import Config
from counterpoint.transport.printable import printable

MOST_WORKERS = 2_000


class RoleEntry(Config):
    """One role."""

    role: str
    """The name of the role."""
    wanted: int
    """How many workers it is to have."""
    fewest: int
    """How few it may be scaled to."""
    most: int
    """How many it may be scaled to."""
    is_task: bool
    """Whether its workers end by themselves; the job is over when all tasks have ended."""
    has_sub_master: bool
    """Whether a worker of it manages the others."""


class WorkerEntry(Config):
    """One worker."""

    worker: str
    """The name of the worker."""
    role: str
    """The role of the worker."""
    rank: int
    """Its rank in the role; -1 for a SubMaster."""
    stage: str
    """INIT, READY, RUNNING, FINISH or FAILED."""
    phase: str
    """Its phase, which is more detailed than its state."""
    incarnation: int
    """How often it was created."""
    node: str
    """The node on which it is, or was last."""
    pid: int
    """Its process; 0 if it has none."""
    restarts: int
    """How often it was started again."""
    last_death: str
    """How it died last; empty unless it did."""
    is_suspected: bool
    """Whether its heartbeats are missing."""
    status: str
    """What it said of itself last; empty if that is not published."""
    trouble: str
    """What is wrong with it while it lives; empty if nothing is."""
    since: float | None
    """The time when it entered its state, in seconds since 1970; None if that is not published."""


class ChangeEntry(Config):
    """A worker, or the job, went from one state to another."""

    time: float
    """The time of the change, in seconds since 1970."""
    worker: str
    """Empty for the job as a whole."""
    before: str
    """Its phase before; empty for a new one."""
    after: str
    """Its phase after the change."""
    incarnation: int
    """Which of its processes."""
    node: str
    """The node on which it was."""
    cause: str
    """The event that led to it, in words."""
    reason: str
    """How the worker died, or why the job ends; empty for others."""


class ClusterAnswer(Config):
    """A job of roles."""

    name: str
    """The name of the job."""
    backend: str
    """The place where its workers run."""
    stage: str
    """INIT, READY, RUNNING, STOPPING or STOPPED; empty if it is not known."""
    outcome: str
    """How it ended; empty while it has not."""
    code: int | None
    """Its exit code; None while it has not ended."""
    epoch: int
    """The number of its present master; each has a higher one."""
    entries: int
    """Entries of its journal that were read."""
    written: float | None
    """The time when the last of them was written, in seconds since 1970."""
    is_complete: bool
    """Whether all of them were read; if not, ask again."""
    roles: list[RoleEntry]
    """Its roles, in the order in which they start."""
    workers: list[WorkerEntry]
    """Its workers, at most 2,000."""
    set_aside: list[str]
    """Nodes that are used no more."""
    changes: list[ChangeEntry]
    """The newest 500, the newest first."""
    problem: str
    """What cannot be read, and why; empty if all can."""


@reads("/jobs/{job}/cluster", "Shows a job's workers.")
def show_cluster(jobs: Jobs, given: JobParameters) -> ClusterAnswer:
    """Answers a job of roles."""
    job = jobs.get(given.job)
    if cluster_directory(job.directory) is None:
        raise NotFound(
            f"{job.id} has no job of roles (yet)",
            where="job",
            value=job.id,
            advice="it has one once `counterpoint run` or `counterpoint submit` has begun",
        )
    with jobs.reading(job, ClusterReader) as reader:
        return _answer(job, reader.read())


def _answer(job: Job, state: ClusterState) -> ClusterAnswer:
    saved, file, outcome = state.saved, state.job, state.outcome
    roles = () if file is None else file.spec.roles
    said = {worker["name"]: worker for worker in read_leniently(job.directory)[1]}
    return ClusterAnswer(
        name="" if file is None else file.spec.name,
        backend="" if file is None else printable(file.backend[:200]),
        stage="" if saved is None else str(saved.job.stage),
        outcome="" if outcome is None else printable(outcome.reason[:2000]),
        code=None if outcome is None else outcome.code,
        epoch=0 if saved is None else saved.epoch,
        entries=0 if saved is None else saved.number,
        written=state.written,
        is_complete=True,
        roles=[
            RoleEntry(
                role=role.name,
                wanted=role.count if saved is None else saved.job.roles[role.name].wanted,
                fewest=role.fewest,
                most=role.most,
                is_task=role.task,
                has_sub_master=role.sub_master is not None,
            )
            for role in roles
        ],
        workers=[
            _worker(record, said.get(_shown(state, record.name), {}))
            for record in ([] if saved is None else list(saved.job.workers.values())[:MOST_WORKERS])
        ],
        set_aside=[] if saved is None else [printable(node[:200]) for node in saved.job.set_aside[:100]],
        changes=[] if saved is None else [_change(change) for change in reversed(saved.changes)],
        problem=state.problem,
    )


def _shown(state: ClusterState, worker: str) -> str:
    return worker if state.job is None else shown_name(state.job.spec, worker)


def _worker(record: WorkerRecord, said: Mapping[str, Any]) -> WorkerEntry:
    """`said` is what the file of processes has of it, which may be anything."""
    pid = said.get("pid")
    return WorkerEntry(
        worker=record.name,
        role=record.role,
        rank=record.rank,
        stage=str(record.stage),
        phase=str(record.phase),
        incarnation=record.incarnation,
        node=printable(record.node[:200]),
        pid=pid if type(pid) is int and 0 < pid < 2**31 else record.pid,
        restarts=record.restarts,
        last_death=printable(record.last_death[:500]),
        is_suspected=record.suspected,
        status=name_of(said.get("status")),
        trouble=name_of(said.get("trouble")),
        since=finite_number(said.get("since")),
    )


def _change(change: StateChange) -> ChangeEntry:
    return ChangeEntry(
        time=change.time,
        worker=change.worker,
        before=change.before,
        after=change.after,
        incarnation=change.incarnation,
        node=printable(change.node[:200]),
        cause=change.cause,
        reason=printable(change.reason[:500]),
    )


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (show_cluster,)
