"""`/jobs/{job}/runs/{run}/rollouts/search`: where a text is. `.../example`: one example across the steps of its run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from counterpoint.job.reading.rollouts.search import SearchAnswer, search
from counterpoint.job.reading.rollouts.selection import Placed
from counterpoint.job.reading.rollouts.step_indexes import IndexProgress, StepIndexes, moment, recorded_steps
from counterpoint.serve.api.rollout_entries import (
    INDEX_SECONDS,
    RUN,
    Filtered,
    Name,
    RunParameters,
    Step,
    job_of,
)
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.jobs import Jobs
from counterpoint.transport.config import Config

SEARCH_SECONDS = 2.0


MOST_STEPS = 500
"""Steps of one answer, the newest."""

MOST_ATTEMPTS = 64
"""Attempts of one step that are named."""


class Attempts(Config):
    """The attempts of one step."""

    step: int
    """The number of the step."""
    numbers: list[int]
    """Their lines in the step's file, at most 64."""
    rewards: list[float | None]
    """The reward of each of these; None if it failed."""
    count: int
    """How many there are."""
    mean: float | None
    """The mean over those with a reward; None if there is none."""
    least: float | None
    """The smallest reward among them."""
    most: float | None
    """The largest reward among them."""


def attempts_by_step(placed: Sequence[Placed]) -> tuple[list[Attempts], int]:
    """Returns the attempts of each step, the oldest first, and how many older steps are left out.

    `placed` has the newest step first.
    """
    found = []
    for step, group in groupby(placed, key=lambda each: each[0]):
        rows = [row for _, row in group]
        rewards = [row.reward for row in rows if row.reward is not None]
        found.append(
            Attempts(
                step=step,
                numbers=[row.number for row in rows[:MOST_ATTEMPTS]],
                rewards=[row.reward for row in rows[:MOST_ATTEMPTS]],
                count=len(rows),
                mean=sum(rewards) / len(rewards) if rewards else None,
                least=min(rewards, default=None),
                most=max(rewards, default=None),
            )
        )
    return found[:MOST_STEPS][::-1], max(0, len(found) - MOST_STEPS)


class SearchParameters(Filtered):
    """What to look for, and where."""

    text: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    """Looked for in prompts, completions and errors, in any letter case."""
    first_step: Step | None = None
    """The oldest step; the oldest that is kept without it."""
    last_step: Step | None = None
    """The newest step, with which the search begins; the newest without it."""
    limit: int = Field(default=20, ge=1, le=100)
    """Most rollouts that are returned."""
    go_on: Annotated[str, StringConstraints(pattern=r"^\d{1,15}-\d{1,15}-\d{1,15}$")] | None = None
    """`go_on` of the answer that this one goes on from."""


@reads(f"{RUN}/rollouts/search", "Searches their texts.", reads_records=True)
def search_rollouts(jobs: Jobs, given: SearchParameters) -> SearchAnswer:
    """Answers a search."""
    job = job_of(jobs, given)
    first = 0 if given.first_step is None else given.first_step
    last = 2**53 if given.last_step is None else given.last_step
    steps = [step for step in reversed(recorded_steps(job.directory, given.run)) if first <= step <= last]
    takes = given.rows.takes_record
    return search(job.directory, given.run, steps, given.text, takes, given.limit, moment(SEARCH_SECONDS), given.go_on)


class ExampleParameters(RunParameters):
    """Which example."""

    environment: Name
    """The environment's name."""
    example_index: int = Field(ge=-(2**53), le=2**53)
    """Its index there."""


class ExampleAnswer(Config):
    """The attempts at one example, step by step."""

    by_step: list[Attempts]
    """The steps with attempts, oldest first."""
    left_out: int
    """Older steps with attempts that are not among them."""
    progress: IndexProgress
    """How many of the run's steps were looked at, the newest first."""


@reads(f"{RUN}/example", "Follows one example across steps.", reads_records=True)
def show_example(jobs: Jobs, given: ExampleParameters) -> ExampleAnswer:
    """Answers an example's attempts."""
    job = job_of(jobs, given)
    steps = recorded_steps(job.directory, given.run)[::-1]
    with jobs.reading(job, StepIndexes) as indexes:
        progress = indexes.index(given.run, steps, moment(INDEX_SECONDS))
        placed = list(indexes.attempts(given.run, steps, given.environment, given.example_index))
    by_step, left_out = attempts_by_step(placed)
    return ExampleAnswer(by_step=by_step, left_out=left_out, progress=progress)


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (search_rollouts, show_example)
