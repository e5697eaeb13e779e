"""What the answers about rollouts share: which run, which rollouts of it, an entry of a list, and how much is indexed."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from counterpoint.job.reading.rollouts.line_index import Outcome
from counterpoint.job.reading.rollouts.selection import Placed, RowFilter
from counterpoint.job.reading.rollouts.step_indexes import StepIndexes, listed_steps, moment
from counterpoint.serve.errors import NotFound
from counterpoint.serve.jobs import Job, Jobs
from counterpoint.transport.config import Config

RUN = "/jobs/{job}/runs/{run}"
ROLLOUT = RUN + "/steps/{step}/rollouts/{number}"

INDEX_SECONDS = 0.4
"""How long one request reads on in files that are not indexed yet; the next request goes on."""

Step = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[int, Field(ge=0, le=10_000_000)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class RunParameters(Config):
    """Which run."""

    job: str
    """The job's id."""
    run: str
    """The run's id."""


class Filtered(RunParameters):
    """Which rollouts of it."""

    environment: Name | None = None
    """Returns only rollouts of this environment."""
    outcome: Outcome | None = None
    """Returns only rollouts with this outcome."""
    least_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Returns only rollouts with at least this reward."""
    most_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Returns only rollouts with at most this reward."""
    player: Name | None = None
    """Returns only rollouts with a turn of this player."""

    @property
    def rows(self) -> RowFilter:
        """The filter."""
        return RowFilter(self.environment, self.outcome, self.least_reward, self.most_reward, self.player)


class OneRollout(RunParameters):
    """Which rollout."""

    step: Step
    """The step of the rollout."""
    number: Number
    """Its line in the step's file, from 0."""


def job_of(jobs: Jobs, given: RunParameters) -> Job:
    """Returns the job; raises `NotFound` unless it has the run."""
    job = jobs.get(given.job)
    job.run_directory(given.run)
    return job


def line_of(jobs: Jobs, given: OneRollout) -> tuple[Placed, bytes]:
    """Returns a rollout's row and line. Raises `NotFound`."""
    job = job_of(jobs, given)
    if given.step in listed_steps(job.directory, given.run):
        with jobs.reading(job, StepIndexes) as indexes:
            found = indexes.line(given.run, given.step, given.number, moment(INDEX_SECONDS))
        if found is not None:
            return (given.step, found[0]), found[1]
    raise NotFound(
        f"step {given.step} has no rollout number {given.number}, or it is not indexed yet",
        where="number",
        value=str(given.number),
        advice="ask again if the step has just been opened",
    )
