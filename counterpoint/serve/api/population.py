"""`/jobs/{job}/population`: an experiment's trials, their scores over iterations, and the copies between them."""

from __future__ import annotations

from typing import Any

from counterpoint.job.reading.rollouts.step_indexes import moment
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.errors import NotFound
from counterpoint.serve.jobs import Jobs
from counterpoint.serve.readers.population import PopulationAnswer, PopulationReader, is_experiment
from counterpoint.transport.config import Config

READ_SECONDS = 1.0


class JobParameters(Config):
    """Which directory."""

    job: str
    """The id of the job."""


@reads("/jobs/{job}/population", "Shows an experiment's trials.")
def show_population(jobs: Jobs, given: JobParameters) -> PopulationAnswer:
    """Answers an experiment."""
    job = jobs.get(given.job)
    if not is_experiment(job.directory):
        raise NotFound(
            f"{job.id} is no experiment of `counterpoint tune`",
            where="job",
            value=job.id,
            advice="name the experiment's directory: counterpoint serve DIRECTORY",
        )
    with jobs.reading(job, PopulationReader) as reader:
        return reader.read(moment(READ_SECONDS))


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (show_population,)
