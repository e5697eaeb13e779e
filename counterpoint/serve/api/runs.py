"""`/jobs/{job}/runs/{run}` and `/jobs/{job}/metrics`: a run, its configuration, the verdict on it, and curves of several runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, StringConstraints

from counterpoint.job.reading.metrics.downsample import rounded
from counterpoint.job.reading.metrics.run_series import READING_SECONDS, Axis, JobSeries, RunSeries, Window
from counterpoint.job.reading.redaction import run_configuration
from counterpoint.run.changes import JournalError, read_journal
from counterpoint.run.config import RunConfig
from counterpoint.serve.api.overview import ProblemEntry, RunEntry, facts_of, problem_entry, run_entry
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.errors import NotFound
from counterpoint.serve.jobs import Job, Jobs
from counterpoint.serve.readers.problems import problems_of_run
from counterpoint.trainer.runs.control_files import MAX_CONFIG_BYTES
from counterpoint.transport.config import Config, Identifier
from counterpoint.transport.configuration.schema import keys_of
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.untrusted import UntrustedFileError, read_toml
from counterpoint.transport.printable import printable
from counterpoint.transport.process.child import ChildError
from counterpoint.transport.process.child import run as run_child
from counterpoint.verify.report import BEING_WRITTEN, BROKEN_CHAIN, DAMAGED, NO_RECEIPTS, SOUND, Damage

MOST_RUNS, MOST_METRICS = 16, 32

MOST_CURVES = 128
"""Curves of one answer: runs times metrics."""

MOST_CHANGES = 1_000
"""Newest changes that are shown."""

MOST_TABLES, MOST_KEYS = 5_000, 1_000
"""Tables of runs and keys of a job's file that are looked at."""

VERIFYING_SECONDS = 25.0
"""How long the check of a run may take here; the command has no deadline."""

MOST_FINDINGS = 100
"""Findings of one answer."""

VERDICTS = {
    SOUND: "sound",
    DAMAGED: "damaged",
    NO_RECEIPTS: "no receipts",
    BEING_WRITTEN: "being written",
    BROKEN_CHAIN: "broken chain",
}
"""The verdicts by the command's exit code (`docs/receipts.md`)."""

COPIES = "copied/step"
"""Metric of a step that was a copy of another run's."""

MetricName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class RunParameters(Config):
    """Which run."""

    job: Identifier
    """The job's id."""
    run: Identifier
    """The run's id."""


class ChangeEntry(Config):
    """A change of the configuration while the run is trained."""

    step: int
    """The first step with the new values."""
    changes: dict[str, Any]
    """New values by dotted key."""
    given: dict[str, Any]
    """The values that the run's file had for them."""


class RunDetail(Config):
    """One run."""

    run: RunEntry
    """The newest numbers of the run."""
    problems: list[ProblemEntry]
    """What is wrong with it."""
    metrics: list[str]
    """The names of curves that it has, sorted."""
    configuration: dict[str, Any]
    """The configuration as its orchestrator resolved it. Secrets are replaced by `(hidden)`."""
    given: dict[str, str]
    """The keys of it that the job's file gives, with their defaults as TOML; empty without a file, as of a guest."""
    changes: list[ChangeEntry]
    """What was changed since; the newest 1,000."""
    changes_error: str
    """Why the changes cannot be read; empty if they can."""


class Verification(Config):
    """The verdict on one run, at the time of the request."""

    verdict: str
    """`sound`, `damaged`, `no receipts`, `being written` or `broken chain`."""
    steps: int
    """Steps with a receipt; of a driven run, items."""
    head: str
    """The hash of the newest receipt."""
    findings: list[str]
    """The damage in words, at most 100 pieces of it."""
    more: int
    """Further pieces."""
    checked: dict[str, int]
    """What was checked, and how many of each."""
    unchecked: dict[str, int]
    """What could not be checked, in words, and how many of each."""


class WindowParameters(Config):
    """Which part of curves."""

    x: Axis = "step"
    """What they are drawn over: steps, or Unix seconds."""
    x_from: Finite | None = None
    """The least x; the first without it."""
    x_to: Finite | None = None
    """The greatest x; the last without it."""
    points: int = Field(default=500, ge=10, le=5000)
    """Most points of a curve."""

    @property
    def window(self) -> Window:
        """The part."""
        return Window(self.x, self.x_from, self.x_to, self.points)


class MetricsParameters(WindowParameters):
    """Which curves."""

    job: Identifier
    """The job's id."""
    run: list[Identifier] = Field(min_length=1, max_length=MOST_RUNS)
    """The ids of the runs."""
    metric: list[MetricName] = Field(min_length=1, max_length=MOST_METRICS)
    """The metrics, by their names in `metrics.jsonl` of the run or of the trainer; also `seconds_a_step` and
    `completion_tokens_per_second`, which are computed."""


class Series(Config):
    """One curve. Steps without a value are left out."""

    run: str
    """The run's id."""
    metric: str
    """The metric's name."""
    exact: bool
    """Whether each point is one step. If not, it is a stretch of them."""
    x: list[float]
    """Ascending; of a stretch, the mean."""
    mean: list[float | None]
    """The value, or the mean of the stretch."""
    low: list[float | None]
    """The least of the stretch."""
    high: list[float | None]
    """The greatest of the stretch."""


class Annotation(Config):
    """Something that happened to a run at a step."""

    run: str
    """The run's id."""
    kind: Literal["change", "copy"]
    """A change of its configuration, or a copy of another run's weights."""
    step: int
    """The step at which it happened."""
    x: float | None
    """The place on the axis; null if that step is not there yet."""
    text: str
    """The event in words."""


class Metrics(Config):
    """Curves of runs."""

    series: list[Series]
    """One series for each run and each metric, in the order of the request."""
    annotations: list[Annotation]
    """What happened in the part that is shown."""
    unreadable: list[str]
    """Files that cannot be read, and why, or that have not been read to their end, and how far."""


@reads("/jobs/{job}/runs/{run}", "Shows one run: its newest numbers, problems, configuration and changes.")
def run_detail(jobs: Jobs, parameters: RunParameters) -> RunDetail:
    """Answers `GET /jobs/{job}/runs/{run}`."""
    job = jobs.get(parameters.job)
    facts = facts_of(jobs, job)
    run = next((run for run in facts.runs if run.run_id == parameters.run), None)
    if run is None or os.path.lexists(job.directory / f"run_{parameters.run}"):  # a run that is about to begin has none
        run_dir = job.run_directory(parameters.run)
    if run is None:
        raise NotFound(f"{run_dir.name}/ of job {job.id} holds no run", where="run", value=parameters.run)
    changes, error = _changes_of(job, parameters.run)
    with jobs.reading(job, JobSeries) as reader:
        names = reader.run(parameters.run, []).names()
    return RunDetail(
        run=run_entry(job, run, facts.balance),
        problems=[problem_entry(job, problem) for problem in problems_of_run(run, facts.now, facts.directory)],
        metrics=[printable(name[:200]) for name in names],
        configuration=run_configuration(job.directory, parameters.run),
        given=_given(job, parameters.run),
        changes=changes,
        changes_error=error,
    )


@reads(
    "/jobs/{job}/runs/{run}/verification",
    "Checks a run that has ended against its receipts, as `counterpoint verify` does.",
    fresh_seconds=10.0,
)
def verification(jobs: Jobs, parameters: RunParameters) -> Verification:
    """Answers `GET /jobs/{job}/runs/{run}/verification`, by a process of its own: the run's files may be large, and hostile."""
    run_dir = jobs.get(parameters.job).run_directory(parameters.run)
    command = [sys.executable, "-P", "-m", "counterpoint.cli.main", "verify", str(run_dir.parent)]
    command += ["--run", parameters.run, "--json"]
    advice = f"`counterpoint verify {run_dir.parent} --run {parameters.run}` says more, and has no deadline"
    try:
        outcome = run_child("the check of a run", command, VERIFYING_SECONDS)
    except (TimeoutError, ChildError) as error:
        raise UserError(f"{error}; {advice}") from None
    if outcome.code not in VERDICTS:
        raise UserError(f"the check of run {parameters.run} ended with exit code {outcome.code}; {advice}")
    found: dict[str, Any] = orjson.loads(outcome.output)
    findings = [str(Damage(**each)) for each in found["findings"]]
    return Verification(
        verdict=VERDICTS[outcome.code],
        steps=found["steps"],
        head=found["head"],
        findings=findings[:MOST_FINDINGS],
        more=found["more"] + max(0, len(findings) - MOST_FINDINGS),
        checked=found["checked"],
        unchecked=found["unchecked"],
    )


@reads(
    "/jobs/{job}/metrics", "Gives curves of up to 16 runs of a job, by step or time, with at most so many points each."
)
def metrics(jobs: Jobs, parameters: MetricsParameters) -> Metrics:
    """Answers `GET /jobs/{job}/metrics`."""
    job = jobs.get(parameters.job)
    names = [*dict.fromkeys(parameters.metric)]
    run_ids = [*dict.fromkeys(parameters.run)][: max(1, MOST_CURVES // len(names))]
    for run_id in run_ids:
        job.run_directory(run_id)
    found: list[Series] = []
    annotations: list[Annotation] = []
    unreadable: list[str] = []
    deadline = time.monotonic() + READING_SECONDS
    with jobs.reading(job, JobSeries) as reader:
        for run_id in run_ids:
            series = reader.run(run_id, [*names, COPIES], deadline)
            if reader.unreadable:
                unreadable.append(printable(reader.unreadable[:2000]))
            found += [series_of(series, name, parameters.window) for name in names]
            annotations += _annotations(job, series, parameters.window)
    return Metrics(series=found, annotations=annotations, unreadable=[*dict.fromkeys(unreadable)])


def series_of(series: RunSeries, name: str, window: Window) -> Series:
    """Returns one curve of a run."""
    curve = series.curve(name, window)
    return Series(
        run=series.shipped.run_id,
        metric=name,
        exact=curve.exact,
        x=[round(x, 3) for x in curve.x.tolist()],
        mean=rounded(curve.mean),
        low=rounded(curve.low),
        high=rounded(curve.high),
    )


def _given(job: Job, run_id: str) -> dict[str, str]:
    """The run's keys in `job.toml`: those of `[orchestrator]`, and of its own table of `[[runs]]`."""
    try:
        file = read_toml(job.directory / "job.toml", MAX_CONFIG_BYTES)
    except (OSError, UntrustedFileError):
        return {}
    runs = file.get("runs")
    tables = [file.get("orchestrator"), *(runs if isinstance(runs, list) else [])]
    own = [each for each in tables[:MOST_TABLES] if isinstance(each, dict) and each.get("run_id", run_id) == run_id]
    known = keys_of(RunConfig)
    keys = [*dict.fromkeys(key for table in own for key in _dotted(table, ""))][:MOST_KEYS]
    return {printable(key[:200]): known[key].default if key in known else "" for key in keys}


def _dotted(table: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _annotations(job: Job, series: RunSeries, window: Window) -> list[Annotation]:
    """The changes and copies of a run within the window."""
    run_id = series.shipped.run_id
    texts = [("change", each.step, _in_words(each.changes)) for each in _changes_of(job, run_id)[0]]
    copied = series.curve(COPIES, Window(points=MOST_CHANGES))
    texts += [
        ("copy", int(step), f"weights copied from step {source:.0f} of a run")
        for step, source in zip(copied.x, copied.mean, strict=True)
    ]
    annotations: list[Annotation] = []
    for kind, step, text in texts[-MOST_CHANGES:]:
        x = series.place_of(step, window.axis)
        if x is None or (window.begin or -1) <= x <= (float("inf") if window.end is None else window.end):
            shown: Literal["change", "copy"] = "change" if kind == "change" else "copy"
            annotations.append(Annotation(run=run_id, kind=shown, step=step, x=x, text=printable(text[:2000])))
    return annotations


def _in_words(changes: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in changes.items())


def _changes_of(job: Job, run_id: str) -> tuple[list[ChangeEntry], str]:
    """The run's journal of changes, and why it cannot be read."""
    try:
        journal = read_journal(job.directory / f"run_{run_id}")
    except JournalError as error:
        return [], printable(str(error)[:2000])
    entries = [ChangeEntry(step=each.step, changes=each.changes, given=each.given) for each in journal]
    return entries[-MOST_CHANGES:], ""


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (
    run_detail,
    metrics,
    replace(verification, seconds=VERIFYING_SECONDS + 4.0, is_check=True),
)
