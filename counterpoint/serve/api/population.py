"""`/jobs/{job}/population`: an experiment's trials, their scores over iterations, and the copies between them."""

from __future__ import annotations

from typing import Any

from counterpoint.job.inspection.rollout_records import finite_number
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.errors import NotFound
from counterpoint.serve.jobs import Jobs
from counterpoint.serve.readers.population import Copy, Population, PopulationReader, TrialState, is_experiment
from counterpoint.serve.readers.rollouts.step_indexes import moment
from counterpoint.serve.readers.rollouts.view import shown_value
from counterpoint.transport.config import Config
from counterpoint.transport.printable import printable
from counterpoint.tune.result import lookup

READ_SECONDS = 1.0


class JobParameters(Config):
    """Which directory."""

    job: str
    """The id of the job."""


class Values(Config):
    """The values of a trial from one iteration on, by the order of `parameters`."""

    iteration: int
    """The first result with them is the next one."""
    texts: list[str]
    """Each as text; empty where there is none."""
    numbers: list[float | None]
    """Each as a number; None where it is none."""


class TrialEntry(Config):
    """One trial."""

    trial_id: str
    """Unique in its experiment."""
    status: str
    """PENDING, RUNNING, PAUSED, TERMINATED or ERROR."""
    values: list[Values]
    """Its values over time, oldest first; a further entry for each copy."""
    iteration: int
    """Results that it has reported."""
    score: float | None
    """The metric of its last result."""
    seconds: float | None
    """How long it has trained."""
    failures: int
    """How often it has failed."""
    error: str
    """Its last error in one line, of a traceback what was raised; empty without one."""
    copied_from: str
    """The trial that it took over last; empty if it took over none."""
    iterations: list[int]
    """The iterations of its results, thinned out to at most 1,000."""
    scores: list[float]
    """The metric of each."""


class CopyEntry(Config):
    """One trial took over another's state."""

    trial: str
    """The trial that did."""
    source: str
    """The trial whose state it took."""
    iteration: int
    """The trial's iteration at that time."""
    source_iteration: int
    """The iteration of the state that it took."""


class StatusCount(Config):
    """How many trials have one state."""

    status: str
    """The state of the trials."""
    count: int
    """The number of trials in it."""


class PopulationAnswer(Config):
    """An experiment."""

    name: str
    """The name of the experiment."""
    metric: str
    """The metric by which its trials are compared."""
    mode: str
    """`max` or `min`: whether more of it is better."""
    written: float | None
    """The time when its state was written, in seconds since 1970; None if it has not begun."""
    counts: list[StatusCount]
    """All trials by state."""
    parameters: list[str]
    """The names of what differs between trials."""
    best: str
    """The trial with the best last result; empty before the first."""
    trials: list[TrialEntry]
    """The newest 500 trials."""
    copies: list[CopyEntry]
    """Which trial took over which, oldest first."""
    is_complete: bool
    """Whether all results were read; if not, ask again."""
    problems: list[str]
    """What cannot be read, and why."""


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
        found = reader.read(moment(READ_SECONDS))
    return PopulationAnswer(
        name=printable(found.name[:200]),
        metric=printable(found.metric[:200]),
        mode=found.mode,
        written=found.written,
        counts=[StatusCount(status=status, count=count) for status, count in sorted(found.counts.items())][:20],
        parameters=[printable(name[:200]) for name in found.parameters],
        best=_best(found),
        trials=[_entry(trial, found) for trial in found.trials],
        copies=[_copy_entry(copy) for copy in found.copies],
        is_complete=found.is_complete,
        problems=found.problems[:20],
    )


def _best(found: Population) -> str:
    sign = -1.0 if found.mode == "min" else 1.0
    scored = [(sign * trial.score, trial.trial_id) for trial in found.trials if trial.score is not None]
    return max(scored, key=lambda one: one[0])[1] if scored else ""


def _entry(trial: TrialState, found: Population) -> TrialEntry:
    changes = [copy for copy in found.copies if copy.trial == trial.trial_id and copy.config]
    first = _values(0, [trial.first_values.get(name) for name in found.parameters])
    later = [_values(copy.iteration, [lookup(copy.config, name) for name in found.parameters]) for copy in changes]
    values = [first, *later]
    now = _values(trial.iteration, [trial.values.get(name) for name in found.parameters])
    if now.texts != values[-1].texts and not later:
        values.append(now)
    results = trial.results
    return TrialEntry(
        trial_id=trial.trial_id,
        status=trial.status,
        values=values,
        iteration=trial.iteration,
        score=trial.score,
        seconds=trial.seconds,
        failures=trial.failures,
        error=trial.error,
        copied_from=printable(trial.copied_from[:64]),
        iterations=[] if results is None else results.iterations.tolist(),
        scores=[] if results is None else results.scores.tolist(),
    )


def _values(iteration: int, values: list[Any]) -> Values:
    numbers = [None if isinstance(value, bool) else finite_number(value) for value in values]
    texts = ["" if value is None else shown_value(value, 100, indented=False) for value in values]
    return Values(iteration=iteration, texts=texts, numbers=numbers)


def _copy_entry(copy: Copy) -> CopyEntry:
    return CopyEntry(
        trial=copy.trial,
        source=printable(copy.source[:64]),
        iteration=copy.iteration,
        source_iteration=copy.source_iteration,
    )


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (show_population,)
