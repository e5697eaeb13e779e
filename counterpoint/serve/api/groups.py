"""`/jobs/{job}/runs/{run}/groups`: which groups were kept and which dropped, step by step, and why.

The counts are of `decisions.jsonl`, the rollouts of one step of its records.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from counterpoint.job.reading.activity.group_fates import GroupFate, GroupFates, StepFates
from counterpoint.job.reading.rollouts.line_index import IndexedLine
from counterpoint.job.reading.rollouts.step_indexes import IndexProgress, StepIndexes, moment, recorded_steps
from counterpoint.job.reading.rollouts.view import name_of as shown
from counterpoint.orchestrator.rollouts.failures import kind_of
from counterpoint.serve.api.rollout_entries import (
    INDEX_SECONDS,
    RUN,
    RunParameters,
    Step,
    job_of,
)
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.errors import NotFound
from counterpoint.serve.jobs import Jobs
from counterpoint.transport.config import Config

MAX_GROUPS = 500
"""The groups of one step that are listed."""

REASONS_READ = 200
"""Rollouts of one step whose records are read, to say why they were not trained."""

REASON_BYTES = 256 * 2**10
"""Longer records are not read for that."""


class StepsParameters(RunParameters):
    """Which steps."""

    span: int = Field(default=50, ge=1, le=500)
    """How many, ending with the newest."""


class Count(Config):
    """How many there were of one kind."""

    name: str
    """The name of the kind."""
    count: int
    """The number of groups of the kind."""


class StepGroups(Config):
    """What became of groups on the way to one step."""

    step: int
    """Its number. Of the newest, which may not have shipped yet, only what was dropped by now."""
    shipped: int
    """Groups in its batch."""
    dropped: list[Count]
    """Groups that were dropped since the step before, by reason."""
    rollouts_kept: int
    """The rollouts of the shipped groups that are trained."""
    rollouts_filtered: int
    """Caught by a filter."""
    rollouts_failed: int
    """The rollouts that failed."""


class GroupSteps(Config):
    """The newest steps."""

    steps: list[StepGroups]
    """The steps, in ascending order."""
    in_flight: int
    """Groups that have started and have neither shipped nor been dropped."""


class GroupsParameters(RunParameters):
    """Which step."""

    step: Step
    """The number of the step."""


class GroupEntry(Config):
    """One group."""

    group: int
    """The number of the group."""
    environment: str
    """The environment's name; empty if unknown."""
    example_index: int | None
    """The example's index in it."""
    fate: Literal["shipped", "dropped", "unknown"]
    """`unknown`: it has records in this step, and the log of decisions does not reach back that far."""
    reason: str
    """Why it was dropped."""
    detail: str
    """The same in more words."""
    seconds: float | None
    """The seconds from its start to its end."""
    rollouts: int | None
    """How many it had."""
    kept: int | None
    """How many of these were trained."""
    filtered: int | None
    """Caught by a filter."""
    failed: int | None
    """The rollouts that failed."""
    causes: list[Count]
    """Filters and errors of its rollouts, where their records were read."""
    reward_mean: float | None
    """The mean over the rollouts that have a reward."""
    reward_min: float | None
    """The lowest reward of its rollouts."""
    reward_max: float | None
    """The highest. If it equals the lowest, the group teaches nothing."""


class StepGroupsAnswer(Config):
    """The groups of one step."""

    step: int
    """The number of the step."""
    groups: list[GroupEntry]
    """The groups, in the order of their numbers."""
    left_out: int
    """How many more there are."""
    causes: list[Count]
    """Filters and errors of the step's rollouts, where their records were read."""
    causes_of: int
    """How many rollouts were read for that."""
    causes_among: int
    """How many were not trained."""
    progress: IndexProgress
    """How much of the records is indexed. What is not all indexed is not all here: ask again."""


@reads(f"{RUN}/groups", "Counts kept and dropped groups by step.")
def show_steps(jobs: Jobs, given: StepsParameters) -> GroupSteps:
    """Answers the counts of the newest steps."""
    job = job_of(jobs, given)
    with jobs.reading(job, GroupFates, given.run) as fates:
        fates.update()
        return GroupSteps(steps=[_step(each) for each in fates.steps()[-given.span :]], in_flight=fates.in_flight)


@reads(f"{RUN}/steps/{{step}}/groups", "Lists the groups of a step.", reads_records=True)
def show_groups(jobs: Jobs, given: GroupsParameters) -> StepGroupsAnswer:
    """Answers the groups of one step."""
    job = job_of(jobs, given)
    has_records = given.step in recorded_steps(job.directory, given.run)
    with jobs.reading(job, GroupFates, given.run) as fates:
        fates.update()
        found = fates.step(given.step)
        decided = {} if found is None else {fate.group: fate for fate in found.groups}
        left_out = 0 if found is None else found.left_out
    if found is None and not has_records:
        raise NotFound(
            f"nothing is known of the groups of step {given.step}", where="step", value=str(given.step),
            expected="a step whose decisions or records are kept",
        )  # fmt: skip
    shown_steps = [given.step] if has_records else []
    with jobs.reading(job, StepIndexes) as indexes:
        progress = indexes.index(given.run, shown_steps, moment(INDEX_SECONDS))
        placed = list(indexes.rows(given.run, shown_steps))
        untrained = [each for each in placed if each[1].outcome != "completed"]
        records = indexes.records(given.run, untrained[:REASONS_READ], REASON_BYTES)
    rows: defaultdict[int, list[IndexedLine]] = defaultdict(list)
    for _, row in placed:
        if row.group_id is not None:
            rows[row.group_id].append(row)
    causes: defaultdict[int | None, Counter[str]] = defaultdict(Counter)
    for (_, row), record in zip(untrained, records, strict=False):
        causes[row.group_id][_cause(row, record)] += 1
    numbers = sorted({*decided, *rows})
    return StepGroupsAnswer(
        step=given.step,
        groups=[
            _entry(number, decided.get(number), rows.get(number, []), causes[number]) for number in numbers[:MAX_GROUPS]
        ],
        left_out=max(0, len(numbers) - MAX_GROUPS) + left_out,
        causes=_counts(sum(causes.values(), Counter())),
        causes_of=len(records),
        causes_among=len(untrained),
        progress=progress,
    )


def _cause(row: IndexedLine, record: Any) -> str:
    if record is None:
        return "a record that cannot be read"
    if row.outcome == "filtered":
        return f"filter {shown(record.filtered_by)}"
    if row.outcome in ("stale", "dropped"):
        return f"group dropped: {shown(record.dropped)}"
    return shown(kind_of(record.error or "")) or "an error without a message"


def _entry(number: int, fate: GroupFate | None, rows: Sequence[IndexedLine], causes: Counter[str]) -> GroupEntry:
    rewards = [row.reward for row in rows if row.reward is not None]
    outcomes = Counter(row.outcome for row in rows)
    failed = outcomes["failed"] + outcomes["inference_failed"] + outcomes["damaged"]
    has_rows = bool(rows)
    known = fate or GroupFate(number)
    is_dropped = bool(known.reason)
    is_over = known.started is not None and known.ended is not None
    return GroupEntry(
        group=number,
        environment=shown(known.environment) or (rows[0].environment if has_rows else ""),
        example_index=rows[0].example_index if known.example_index is None and has_rows else known.example_index,
        fate="unknown" if fate is None else "dropped" if is_dropped else "shipped",
        reason=shown(known.reason),
        detail=shown(known.detail),
        seconds=(known.ended or 0.0) - (known.started or 0.0) if is_over else None,
        rollouts=len(rows) if has_rows else known.rollouts,
        kept=0 if is_dropped else outcomes["completed"] if has_rows else known.kept,
        filtered=outcomes["filtered"] if has_rows else known.filtered,
        failed=failed if has_rows else known.failed,
        causes=_counts(causes),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        reward_min=min(rewards, default=None),
        reward_max=max(rewards, default=None),
    )


def _step(fates: StepFates) -> StepGroups:
    return StepGroups(
        step=fates.step,
        shipped=fates.groups_shipped,
        dropped=_counts(fates.dropped),
        rollouts_kept=fates.rollouts_kept,
        rollouts_filtered=fates.rollouts_filtered,
        rollouts_failed=fates.rollouts_failed,
    )


def _counts(counter: Counter[str]) -> list[Count]:
    return [Count(name=shown(name), count=count) for name, count in counter.most_common(32)]


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (show_steps, show_groups)
