"""`/jobs/{job}/runs/{run}/rollouts`: lists of what the model wrote, and one rollout turn by turn."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from counterpoint.job.reading.rollouts.line_index import record_in
from counterpoint.job.reading.rollouts.selection import Bars, Sort
from counterpoint.job.reading.rollouts.step_indexes import IndexProgress, StepIndexes, listed_steps, moment
from counterpoint.job.reading.rollouts.view import Parts, RolloutEntry, Text, entry_of, parts_of
from counterpoint.serve.api.rollout_entries import (
    INDEX_SECONDS,
    ROLLOUT,
    RUN,
    Filtered,
    OneRollout,
    Step,
    job_of,
    line_of,
)
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.errors import NotFound
from counterpoint.serve.jobs import Jobs
from counterpoint.transport.config import Config
from counterpoint.transport.printable import printable

LISTED_BYTES = 256 * 2**10
"""Longer lines are listed without their texts."""

DAMAGED_CHARACTERS = 4_000
"""The characters of a line that is no record."""

STEPS_NAMED = 1_000


class ListParameters(Filtered):
    """Which part of which list."""

    step: Step | None = None
    """The step; the newest without it."""
    span: int = Field(default=1, ge=1, le=20)
    """How many steps, ending with that one."""
    sort: Sort = "newest"
    """`worst` and `best` by reward, `longest` by completion tokens, `newest` by step."""
    offset: int = Field(default=0, ge=0, le=10_000_000)
    """Rollouts to pass over."""
    limit: int = Field(default=50, ge=1, le=100)
    """Most rollouts that are returned."""


class RolloutList(Config):
    """One part of a list of rollouts."""

    steps: list[int]
    """All steps whose rollouts are kept, the newest 1,000."""
    shown: list[int]
    """The steps that are listed."""
    total: int
    """How many rollouts the filter takes, of those that are indexed."""
    of: int
    """How many are indexed."""
    environments: list[str]
    """The environments in them."""
    players: list[str]
    """The players in them."""
    rewards: Bars
    """The rewards of all that the filter takes."""
    lengths: Bars
    """The completion tokens of all that the filter takes."""
    rollouts: list[RolloutEntry]
    """The rollouts of this part."""
    progress: IndexProgress
    """How much is indexed."""


@reads(f"{RUN}/rollouts", "Lists rollouts of steps.", reads_records=True)
def list_rollouts(jobs: Jobs, given: ListParameters) -> RolloutList:
    """Answers the list."""
    job = job_of(jobs, given)
    steps = listed_steps(job.directory, given.run)
    shown = _span(steps, given.step, given.span)
    with jobs.reading(job, StepIndexes) as indexes:
        progress = indexes.index(given.run, shown, moment(INDEX_SECONDS))
        found = indexes.select(given.run, shown, given.rows, given.sort, given.offset, given.limit)
        records = indexes.records(given.run, found.part, LISTED_BYTES)
    return RolloutList(
        steps=steps[-STEPS_NAMED:],
        shown=shown,
        total=found.total,
        of=found.of,
        environments=sorted(found.environments)[:200],
        players=sorted(found.players)[:200],
        rewards=found.rewards,
        lengths=found.lengths,
        rollouts=[entry_of(placed, record) for placed, record in zip(found.part, records, strict=True)],
        progress=progress,
    )


class RolloutParameters(OneRollout):
    """Which rollout, and how much of its texts."""

    characters: int = Field(default=20_000, ge=100, le=1_000_000)
    """Most characters of one text: of a longer one the middle is left out."""


class RolloutAnswer(Config):
    """One rollout."""

    entry: RolloutEntry
    """The rollout, as in a list."""
    parts: Parts | None
    """What its record holds; None for a line that is no record."""
    damaged: Text | None
    """The beginning of a line that is no record."""


@reads(ROLLOUT, "Shows one rollout, turn by turn.", reads_records=True)
def show_rollout(jobs: Jobs, given: RolloutParameters) -> RolloutAnswer:
    """Answers one rollout."""
    placed, line = line_of(jobs, given)
    record = record_in(line) if placed[1].outcome != "damaged" else None
    if record is None:
        text = line[:DAMAGED_CHARACTERS].decode(errors="replace")
        damaged = Text(text=printable(text), characters=len(line), left_out=max(0, len(line) - DAMAGED_CHARACTERS))
        return RolloutAnswer(entry=entry_of(placed, None), parts=None, damaged=damaged)
    return RolloutAnswer(entry=entry_of(placed, record), parts=parts_of(record, given.characters), damaged=None)


def _span(steps: list[int], step: int | None, span: int) -> list[int]:
    """Returns the steps that are listed, the newest first."""
    if step is not None and step not in steps:
        kept = f"{steps[0]} to {steps[-1]}" if steps else "none yet"
        raise NotFound(f"no rollouts of step {step} are kept", where="step", value=str(step), expected=kept)
    until = steps if step is None else steps[: steps.index(step) + 1]
    return until[-span:][::-1]


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (list_rollouts, show_rollout)
