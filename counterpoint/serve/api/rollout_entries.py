"""What the answers about rollouts share: which run, which rollouts of it, an entry of a list, and how much is indexed."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from counterpoint.job.reading.rollouts.line_index import Outcome
from counterpoint.job.reading.rollouts.rollout_records import RolloutRecord
from counterpoint.job.reading.rollouts.selection import Placed, RowFilter
from counterpoint.job.reading.rollouts.step_indexes import StepIndexes, listed_steps, moment
from counterpoint.job.reading.rollouts.view import name_of
from counterpoint.serve.errors import NotFound
from counterpoint.serve.jobs import Job, Jobs
from counterpoint.transport.config import Config
from counterpoint.transport.printable import clipped, printable

RUN = "/jobs/{job}/runs/{run}"
ROLLOUT = RUN + "/steps/{step}/rollouts/{number}"

INDEX_SECONDS = 0.4
"""How long one request reads on in files that are not indexed yet; the next request goes on."""

BEGINNING = 160
"""Characters of a completion in a list."""

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


class RolloutEntry(Config):
    """One rollout in a list."""

    step: int
    """The step of the rollout."""
    number: int
    """Its line in the step's file, from 0."""
    rollout_id: str
    """Unique in its run; empty if its line is too long to be read for a list."""
    environment: str
    """The environment's name."""
    example_index: int | None
    """The example's index in its environment."""
    group_id: int | None
    """The group's number."""
    reward: float | None
    """None if it failed."""
    advantage: float | None
    """None if it has none."""
    outcome: Outcome
    """What became of it."""
    reason: str
    """Why it failed, which filter caught it, or why its group was dropped; empty for others."""
    turns: int
    """The number of model calls."""
    completion_tokens: int
    """What the model wrote, in all turns."""
    players: list[str]
    """Its players, if it has several."""
    versions: list[int]
    """The oldest and the newest policy version of its turns."""
    servers: list[str]
    """The servers that answered, at most four."""
    answer: str
    """The beginning of the right answer; empty if its example has none."""
    beginning: str
    """The beginning of its last completion."""


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


def entry_of(placed: Placed, record: RolloutRecord | None) -> RolloutEntry:
    """Returns the entry of a row; without its record, what the index has of it."""
    step, row = placed
    turns = [] if record is None else record.turns
    versions = [version for turn in turns if type(version := turn.get("policy_version")) is int]
    completion = turns[-1].get("completion") if turns else None
    answer = None if record is None else record.fields.get("answer")
    return RolloutEntry(
        step=step,
        number=row.number,
        rollout_id="" if record is None else name_of(record.rollout_id),
        environment=row.environment,
        example_index=row.example_index,
        group_id=row.group_id,
        reward=row.reward,
        advantage=row.advantage,
        outcome=row.outcome,
        reason=""
        if record is None
        else name_of(clipped(record.error or record.filtered_by or record.dropped or "", 200)),
        turns=row.turns,
        completion_tokens=row.completion_tokens,
        players=list(row.players),
        versions=[min(versions), max(versions)] if versions else [],
        servers=sorted({name_of(turn.get("server")) for turn in turns} - {""})[:4],
        answer=printable(answer[:BEGINNING]) if isinstance(answer, str) else "",
        beginning=printable(completion[:BEGINNING]) if isinstance(completion, str) else "",
    )
