"""`/jobs/{job}/sweep`: the targets of a sweep with state, owner, attempts, values and result."""

from __future__ import annotations

import time
from typing import Any

from counterpoint.job.reading.rollouts.rollout_records import finite_number
from counterpoint.job.reading.rollouts.view import shown_value
from counterpoint.job.sweep.rows import Row
from counterpoint.serve.api.population import JobParameters
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.errors import NotFound
from counterpoint.serve.jobs import Jobs
from counterpoint.serve.readers.sweep import SweepReader, is_sweep, reward_of
from counterpoint.transport.config import Config
from counterpoint.transport.printable import printable

MOST_KEYS = 32


class TargetRun(Config):
    """One run of a target."""

    run_id: str
    """The run's id."""
    step: int
    """The newest step that has shipped; 0 before the first."""
    steps: int | None
    """The configured number of steps; None before it has begun."""
    reward: float | None
    """The mean of its last steps."""


class TargetEntry(Config):
    """One target."""

    target: str
    """The id of the target."""
    state: str
    """PENDING, RUNNING, SUCCESS, FAILED, INTERRUPTED or UNREADABLE."""
    is_lost: bool
    """It is RUNNING by its record, and its last heartbeat is older than its lease: its worker is gone, if the clocks agree."""
    owner: str
    """The worker that holds it or held it last, as `host, process`; empty if none did."""
    attempts: int
    """How often it was tried, without attempts that were given back."""
    claims: int
    """How often it was claimed."""
    started: float | None
    """The time when it was claimed last, in seconds since 1970."""
    finished: float | None
    """The time when that ended, in seconds since 1970."""
    seconds: float | None
    """The seconds from the claim to its end, or to its last heartbeat."""
    error: str
    """The error of the last attempt that did not succeed; empty without one."""
    texts: list[str]
    """What it sets, as text, by the order of `keys`."""
    numbers: list[float | None]
    """The same as numbers; None where it is none."""
    reward: float | None
    """The mean reward of its runs' last steps."""
    runs: list[TargetRun]
    """Its runs, at most 16."""


class SweepAnswer(Config):
    """A sweep."""

    keys: list[str]
    """The keys that its targets set; empty if its file was not given."""
    knows_values: bool
    """Whether its file was given: values and results are known only then."""
    targets: list[TargetEntry]
    """Its targets, at most 5,000."""
    left_out: int
    """How many more there are."""
    problem: str
    """Why it cannot be read; empty if it can."""


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
        state = reader.read()
    keys = sorted({key for row in state.rows for key in row.values})[:MOST_KEYS]
    return SweepAnswer(
        keys=[printable(key[:200]) for key in keys],
        knows_values=state.knows_values,
        targets=[_entry(row, keys) for row in state.rows],
        left_out=state.left_out,
        problem=printable(state.problem[:1000]),
    )


def _entry(row: Row, keys: list[str]) -> TargetEntry:
    status, values = row.status, [row.values.get(key) for key in keys]
    lease, beat = status.lease_seconds, status.heartbeat_at
    is_lost = status.state == "RUNNING" and lease is not None and beat is not None and time.time() - beat > lease
    runs = [] if row.result is None else row.result.runs
    return TargetEntry(
        target=status.target_id,
        state=status.state,
        is_lost=is_lost,
        owner="" if status.host is None else printable(f"{status.host[:100]}, process {status.pid}"),
        attempts=status.attempts,
        claims=status.token or 0,
        started=status.started_at,
        finished=status.finished_at,
        seconds=status.duration,
        error=printable((status.error or "")[:500]),
        texts=["" if value is None else shown_value(value, 100, indented=False) for value in values],
        numbers=[None if isinstance(value, bool) else finite_number(value) for value in values],
        reward=finite_number(reward_of(row)),
        runs=[
            TargetRun(run_id=run.run_id, step=run.step, steps=run.steps, reward=finite_number(run.reward))
            for run in runs[:16]
        ],
    )


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (show_sweep,)
