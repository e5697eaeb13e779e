"""`GET /jobs`: which jobs there are."""

from __future__ import annotations

from typing import Any

from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.jobs import Jobs, Kind, kind_of
from counterpoint.transport.config import Config
from counterpoint.transport.printable import printable


class NoParameters(Config):
    """Nothing to say."""


class JobEntry(Config):
    """One directory that was named on the command line, or that is in such a folder of jobs."""

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


@reads("/jobs", "Lists the jobs.")
def list_jobs(jobs: Jobs, parameters: NoParameters) -> JobList:
    """Answers `GET /jobs`."""
    return JobList(
        jobs=[JobEntry(id=job.id, directory=printable(str(job.directory)), kind=kind_of(job.directory)) for job in jobs]
    )


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (list_jobs,)
