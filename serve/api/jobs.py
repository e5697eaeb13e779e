"""`GET /jobs`: which jobs there are."""

from __future__ import annotations

from typing import Any, Literal

from counterpoint.cluster.job_files import JOB_FILE as CLUSTER_JOB_FILE
from counterpoint.job.directory import JOB_FILE, run_ids_in
from counterpoint.serve.endpoint import Endpoint
from counterpoint.serve.jobs import Job, Jobs
from counterpoint.serve.readers.population import is_experiment
from counterpoint.serve.readers.sweep import is_sweep
from counterpoint.transport.config import Config
from counterpoint.transport.printable import printable

Kind = Literal["job", "cluster", "experiment", "sweep", "other", "missing"]


class NoParameters(Config):
    """Nothing to say."""


class JobEntry(Config):
    """One directory that was named on the command line."""

    id: str
    """The job's id in the API."""
    directory: str
    """The absolute path of the job's directory."""
    kind: Kind
    """`job`: of `counterpoint run`, or of roles that were started one by one. `cluster`: of `counterpoint submit`.
    `experiment`: of `counterpoint tune`. `sweep`: the records of a sweep's targets, or its file. `other`: a directory that
    holds none of them yet. `missing`: there is none now."""


class JobList(Config):
    """The jobs, in the order of the command line."""

    jobs: list[JobEntry]
    """One entry a directory."""


def list_jobs(jobs: Jobs, parameters: NoParameters) -> JobList:
    """Answers `GET /jobs`."""
    return JobList(
        jobs=[JobEntry(id=job.id, directory=printable(str(job.directory)), kind=kind_of(job)) for job in jobs]
    )


def kind_of(job: Job) -> Kind:
    """Returns what a job's directory holds now."""
    try:
        if not job.directory.is_dir():
            return "sweep" if job.directory.is_file() and is_sweep(job.directory) else "missing"
        if (job.directory / CLUSTER_JOB_FILE).is_file():
            return "cluster"
        if (job.directory / JOB_FILE).is_file() or run_ids_in(job.directory):
            return "job"
        if is_experiment(job.directory):
            return "experiment"
        return "sweep" if is_sweep(job.directory) else "other"
    except OSError:  # such as one that we may not read
        return "missing"


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (
    Endpoint("GET", "/jobs", "Lists the jobs.", NoParameters, JobList, list_jobs),
)
