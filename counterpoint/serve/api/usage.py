"""`/jobs/{job}/usage`: what the processes of a job take of their machine, over time."""

from __future__ import annotations

from typing import Any

from counterpoint.job.reading.activity.usage import UsageReader, UsageSeries
from counterpoint.serve.api.population import JobParameters
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.jobs import Jobs
from counterpoint.transport.config import Config
from counterpoint.transport.files.untrusted import UntrustedFileError


class Usage(Config):
    """What a job takes of its machine; empty if nobody has measured."""

    series: list[UsageSeries]
    """The figures, process by process."""


@reads("/jobs/{job}/usage", "Shows what a job's processes take of their machine.")
def show_usage(jobs: Jobs, given: JobParameters) -> Usage:
    """Answers `GET /jobs/{job}/usage`."""
    with jobs.reading(jobs.get(given.job), UsageReader) as reader:
        try:
            return Usage(series=reader.read())
        except (OSError, UntrustedFileError):
            return Usage(series=[])


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (show_usage,)
