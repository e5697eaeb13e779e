"""`/overview`: every job and run with its newest numbers, and what is wrong, worst first."""

from __future__ import annotations

from typing import Any, Literal

from counterpoint.job.reading.job_facts import JobFacts, JobReader, RunFacts
from counterpoint.job.reading.redaction import redact_line
from counterpoint.orchestrator.scheduling.lossless import BOUND
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.jobs import Job, Jobs, kind_of
from counterpoint.serve.jobs import Kind as JobKind
from counterpoint.serve.readers.next_steps import NextStep, next_step
from counterpoint.serve.readers.problems import JobProblem, Kind, problems_of
from counterpoint.transport.config import Config, Identifier
from counterpoint.transport.printable import clipped, printable

LONGEST_TEXT = 2_000
"""Characters of a reason, or of another text that a guest may have written."""

MOST_PROBLEMS = 500
"""Problems that are listed; the others are counted."""

WITH_RUNS: frozenset[JobKind] = frozenset({"job", "other", "missing"})
"""The kinds of directories in which runs are, or may begin."""

LONGEST_NAME = 190
"""Characters of a metric's name, so that its interval's can be asked for, too."""

DISK_UNIT = 2**27
"""Free bytes are rounded down to it, so that an answer is the same while nothing else changes."""


class OverviewParameters(Config):
    """Which jobs."""

    job: Identifier | None = None
    """This one; all without it."""


class WorkerEntry(Config):
    """One worker of a job."""

    name: str
    """The name of the worker."""
    state: str
    """Its state in a word."""
    since: float
    """The time when it entered that state, in Unix seconds."""
    restarts: int
    """How often it was started again."""
    status: str
    """The last that it said of itself."""
    trouble: str
    """What is wrong with it while it lives; empty if nothing is."""
    last_death: str
    """How it died last; empty unless it did."""
    last_output: str
    """The last line of its output when it died last."""
    alive: bool | None
    """Whether its process lives; null if that cannot be told, since it may be on another machine."""


class JobOverview(Config):
    """One job."""

    id: str
    """Its id in the API."""
    directory: str
    """The absolute path of the job's directory."""
    kind: JobKind
    """The kind, as in `GET /jobs`. Only a `job` has runs."""
    state: str
    """The state that its supervisor wrote last; empty if it has none."""
    running: bool
    """Whether `counterpoint run` runs."""
    runs: int
    """How many it has."""
    disk_bytes: int | None
    """Size of the disk that the directory is on."""
    disk_free_bytes: int | None
    """Free on it, rounded down to 128 MiB."""
    error: str
    """Why the job cannot be read; empty if it can."""
    workers: list[WorkerEntry]
    """The workers of the job."""
    next: str
    """What its reader does next, in a sentence; empty for kinds without runs."""
    next_commands: list[str]
    """The commands for it."""


class RunEntry(Config):
    """One run's newest numbers. Null: not known. Seconds, and Unix seconds for moments."""

    job: str
    """The job's id."""
    run: str
    """The id of the run."""
    guest: bool
    """Whether the job did not start it."""
    fine_tuning: bool
    """Whether it trains on data, without rollouts (`counterpoint sft`, `[sft]`)."""
    state: str
    """Its state, as `counterpoint status` prints it."""
    alive: bool
    """Whether its orchestrator lives; of a fine-tuning, its command."""
    paused: bool
    """Whether it is paused."""
    step: int
    """The newest step that was shipped; of a fine-tuning, trained; 0 before the first."""
    steps: int | None
    """How many it shall have."""
    trained: int
    """The newest step that was trained."""
    updated: float | None
    """The time when that step was shipped, or trained."""
    reward: float | None
    """Mean reward of the newest step."""
    loss: float | None
    """The loss of the newest trained step."""
    evaluated: float | None
    """The newest result of its first evaluation: pass@k, or its reward."""
    evaluation: str
    """The same in words, such as `pass@1 0.069`; empty without a result."""
    evaluation_metric: str
    """The metric whose curve has that result, such as `evaluation/sums/pass@1`; empty without one."""
    rewards: list[float]
    """Mean rewards of steps that are evenly spread over the whole run, at most 49, ascending, the newest last."""
    tokens_per_second: float | None
    """Completion tokens, over the newest ten steps."""
    staleness: float | None
    """Mean of the newest step."""
    staleness_lossless: float | None
    """The smallest `max_off_policy_steps` with which none of its newest rollouts is too old; a lower bound where some are."""
    balance: str
    """Which of trainer and servers waits, how long, and what would end it; empty if neither does for long."""
    lag_p99: float | None
    """The event loop's, in the newest step."""
    lag_max: float | None
    """The event loop's, in the newest step."""
    mismatch_kl: float | None
    """The mismatch KL of the newest trained step."""
    seconds_a_step: float | None
    """The median of the newest steps."""
    seconds_left: float | None
    """The seconds left at that rate; null if its orchestrator does not live."""


class ProblemEntry(Config):
    """Something that a person should look at."""

    kind: Kind
    """What it is about."""
    severity: Literal["error", "warning"]
    """`error`: steps are lost or not made."""
    job: str
    """The job's id."""
    run: str
    """The run's id; empty if it is not about one run."""
    worker: str
    """The worker's name; empty if it is not about one worker."""
    since: float | None
    """The time when it began, in Unix seconds."""
    reason: str
    """The observation that makes it a problem."""
    advice: str
    """The advice about what to do."""


class Overview(Config):
    """Everything at one look."""

    problems: list[ProblemEntry]
    """Errors first; the first 500."""
    problem_count: int
    """How many there are."""
    jobs: list[JobOverview]
    """The jobs, in the order of the command line."""
    runs: list[RunEntry]
    """The runs, job by job, the job's own before guests."""


@reads(
    "/overview",
    "Shows every job, run and worker with its newest numbers, and the problems, errors first.",
    fresh_seconds=1.5,
)
def overview(jobs: Jobs, parameters: OverviewParameters) -> Overview:
    """Answers `GET /overview`."""
    chosen = [jobs.get(parameters.job)] if parameters.job is not None else [*jobs]
    entries: list[JobOverview] = []
    runs: list[RunEntry] = []
    problems: list[ProblemEntry] = []
    for job in chosen:
        facts = facts_of(jobs, job)
        found = [problem_entry(job, problem) for problem in problems_of(facts)]
        entries.append(_job_entry(job, facts, sum(problem.severity == "error" for problem in found)))
        runs += [run_entry(job, run, facts.balance) for run in facts.runs]
        problems += found
    problems.sort(key=lambda problem: (problem.severity != "error", -(problem.since or 0.0)))
    return Overview(problems=problems[:MOST_PROBLEMS], problem_count=len(problems), jobs=entries, runs=runs)


def facts_of(jobs: Jobs, job: Job) -> JobFacts:
    """Returns what is known of a job now."""
    with jobs.reading(job, JobReader) as reader:
        return reader.read()


def run_entry(job: Job, run: RunFacts, balance: str) -> RunEntry:
    """Returns a run's row. `balance` is the job's."""
    history = run.history
    shipped, trained = history.last_shipped, history.last_trained
    return RunEntry(
        job=job.id,
        run=run.run_id,
        guest=run.is_guest,
        fine_tuning=run.is_fine_tuning,
        state=_text(run.state),
        alive=run.alive,
        paused=run.paused,
        step=run.newest.get("step", 0),
        steps=history.steps,
        trained=trained.get("step", 0),
        updated=run.newest.get("time"),
        reward=shipped.get("reward/mean"),
        loss=trained.get("loss"),
        evaluated=None if (found := history.evaluations.figure) is None else found[1],
        evaluation=_text(history.evaluations.headline),
        evaluation_metric=printable(metric) if len(metric := history.evaluations.curve) <= LONGEST_NAME else "",
        rewards=[float(f"{value:.4g}") for value in run.rewards],
        tokens_per_second=history.tokens_per_second(),
        staleness=shipped.get("staleness/mean"),
        staleness_lossless=shipped.get(BOUND),
        balance=balance,
        lag_p99=shipped.get("event_loop_lag/p99"),
        lag_max=shipped.get("event_loop_lag/max"),
        mismatch_kl=trained.get("mismatch_kl"),
        seconds_a_step=run.seconds_a_step,
        seconds_left=run.seconds_left,
    )


def problem_entry(job: Job, problem: JobProblem) -> ProblemEntry:
    """Returns a problem as the API shows it."""
    return ProblemEntry(
        kind=problem.kind,
        severity=problem.severity,
        job=job.id,
        run=problem.run,
        worker=_text(problem.worker),
        since=problem.since,
        reason=_text(problem.reason),
        advice=_text(problem.advice),
    )


def _job_entry(job: Job, facts: JobFacts, errors: int) -> JobOverview:
    free = facts.disk_free_bytes
    kind = kind_of(job.directory)
    do = next_step(facts, errors) if kind in WITH_RUNS else NextStep("")
    return JobOverview(
        id=job.id,
        directory=_text(str(job.directory)),
        kind=kind,
        state=_text(facts.state),
        running=facts.running,
        runs=len(facts.runs),
        disk_bytes=facts.disk_bytes,
        disk_free_bytes=None if free is None else free // DISK_UNIT * DISK_UNIT,
        error=_text(facts.error),
        workers=[_worker_entry(worker) for worker in facts.workers],
        next=do.text,
        next_commands=[_text(command) for command in do.commands],
    )


def _worker_entry(worker: dict[str, Any]) -> WorkerEntry:
    return WorkerEntry(
        name=_text(worker["name"]),
        state=_text(worker["state"]),
        since=worker["since"],
        restarts=int(worker["restarts"]),
        status=_text(worker["status"]),
        trouble=_text(worker["trouble"]),
        last_death=_text(worker["last_death"]),
        last_output=_text(redact_line(str(worker.get("last_output", "")))),
        alive=worker["alive"],
    )


def _text(text: str) -> str:
    return printable(clipped(text, LONGEST_TEXT))


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (overview,)
