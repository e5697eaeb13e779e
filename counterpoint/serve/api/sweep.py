"""`/jobs/{job}/sweep`: the targets of a sweep with state, owner, attempts, values and result."""

from __future__ import annotations

from typing import Any

from counterpoint.serve.api.population import JobParameters
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.errors import NotFound
from counterpoint.serve.jobs import Jobs
from counterpoint.serve.readers.sweep import SweepAnswer, SweepReader, is_sweep


@reads("/jobs/{job}/sweep", "Shows a sweep's targets.")
def show_sweep(jobs: Jobs, given: JobParameters) -> SweepAnswer:
    """Answers a sweep."""
    job = jobs.get(given.job)
    try:
        found = is_sweep(job.directory)
    except OSError:
        found = False
    if not found:
        raise NotFound(
            f"{job.id} is no sweep",
            where="job",
            value=job.id,
            advice="name the sweep's file, or the folder with its name below its root: counterpoint serve FILE",
        )
    with jobs.reading(job, SweepReader) as reader:
        return reader.read()


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (show_sweep,)
