"""The problems of a job, each with its reason, since when, and what to do: pure functions of what is known.

A problem is something that a person should look at. A healthy job has none, however its numbers scatter: so the rules compare
several steps, and each run with itself. The page shows them on top. `counterpoint/job/reading/job_facts.py` has what is known.
"""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal

from counterpoint.cluster.worker_view import State
from counterpoint.job.number_format import duration, scientific
from counterpoint.job.reading.job_facts import JobFacts, RunFacts
from counterpoint.job.reading.metrics.metrics_lines import Line
from counterpoint.job.reading.redaction import redact_line
from counterpoint.orchestrator.early_warnings.rules import Sign
from counterpoint.orchestrator.rollouts import branching
from counterpoint.orchestrator.rollouts.failures import PREFIX, failures_in_words, sum_failures
from counterpoint.orchestrator.scheduling.lossless import in_words as lost_in_words
from counterpoint.orchestrator.step.differences import show_command
from counterpoint.orchestrator.step.discarded import in_words
from counterpoint.orchestrator.step.shares import REMEDY, shortfalls
from counterpoint.run.loop_health.slow_spots import in_words as slow_spots_in_words
from counterpoint.run.loop_health.slow_spots import slow_spots_of
from counterpoint.run.loop_health.watchdog import FAILING
from counterpoint.trainer.telemetry import mismatch
from counterpoint.transport.outages import OutageKind as OutageKind

GIB = 2**30

_LOGS = re.compile(r"(`counterpoint logs [^` ]+)`")
"""A command in an advice that lacks its job."""


class Kind(StrEnum):
    """What a problem is about."""

    UNREADABLE = "unreadable"
    SUPERVISOR_GONE = "supervisor-gone"
    WORKER_FAILED = "worker-failed"
    WORKER_RESTARTING = "worker-restarting"
    RESTARTED = "restarted"
    TROUBLE = "trouble"
    NOT_SERVING = "not-serving"
    NO_TRAINER = "no-trainer"
    DISK_FULL = "disk-full"
    EVICTED = "evicted"
    REFUSED = "refused"
    STALLED = "stalled"
    NOTHING_SHIPS = "nothing-ships"
    NO_DIFFERENCE = "no-difference"
    FAILING_ENVIRONMENT = "failing-environment"
    FAILING_INFERENCE = "failing-inference"
    ENVIRONMENT_RESTARTED = "environment-restarted"
    SHORT_OF_SHARE = "short-of-share"
    MANY_SAMPLES = "many-samples"
    MISMATCH = "mismatch"
    NOT_FINITE = "not-finite"
    LAG = "lag"
    CUT = Sign.CUT.value
    ENTROPY = Sign.ENTROPY.value
    STALE_WEIGHTS = Sign.STALE_WEIGHTS.value
    MASKED = Sign.MASKED.value
    GRADIENT_CLIPPED = Sign.GRADIENT_CLIPPED.value
    HELD_OUT = Sign.HELD_OUT.value
    TRADE_OFF = Sign.TRADE_OFF.value
    PLATEAU = Sign.PLATEAU.value
    DRIFT = Sign.DRIFT.value
    PARTS = Sign.PARTS.value
    CONSTANT_ANSWER = Sign.CONSTANT_ANSWER.value
    REPEATED = Sign.REPEATED.value
    FEW_DIFFERENCES = Sign.FEW_DIFFERENCES.value


@dataclass(frozen=True, slots=True)
class JobProblem:
    """One problem of a job, of one of its runs or of one of its workers."""

    kind: Kind
    severity: Literal["error", "warning"]
    """`error`: steps are lost or not made. `warning`: look at it."""
    reason: str
    advice: str
    """The advice about what to do."""
    since: float | None = None
    """Unix seconds; None if unknown."""
    run: str = ""
    worker: str = ""


STALL_MEDIANS, STALL_SLOWEST = 5.0, 2.0
"""A step is overdue after so many times the median of the newest steps, and so many times the longest of them."""

STALL_ERROR = 8.0
"""A stall is an error this many times later than it is a warning."""

LEAST_ROLLOUTS = 20
"""Fewer rollouts say nothing about an environment."""

FAILING_SHARE, BROKEN_SHARE = 0.2, 0.6
"""Shares of rollouts that fail: of a warning, and of an error."""

RISING_STEPS, RISING_FACTOR, RISING_LEAST = 4, 4.0, 0.02
"""Mismatch KL is rising if the median of so many newest steps is so many times that of the steps before, and at least this."""

MOST_MISMATCH = 0.3
"""A mismatch KL above this makes an importance ratio meaningless, however long it has been so."""

LAG_STEPS = 3
"""Newest steps whose lag is compared with the configured warnings."""

RESTART_SECONDS = 900.0
"""A restart is a problem for so long."""

DISK_ERROR, DISK_WARNING = (0.01, 2 * GIB), (0.05, 20 * GIB)
"""Share of the disk and bytes that are free: below both, it is nearly full."""


def problems_of(job: JobFacts) -> list[JobProblem]:
    """Returns the problems of the job and of its runs, errors first, then those that began last."""
    found = [_with_job(one, job.directory) for one in (*_of_job(job), *_of_workers(job), *_of_outages(job))]
    for run in job.runs:
        found += problems_of_run(run, job.now, job.directory)
    found = [one for one in found if not _is_effect(one, found)]
    return sorted(found, key=lambda problem: (problem.severity != "error", -(problem.since or 0.0)))


def problems_of_run(run: RunFacts, now: float, job: Path) -> list[JobProblem]:
    """Returns the problems of one run of `job`, a directory. Of one that is over, its metrics are no problem any more."""
    found = [*_exclusion(run)]
    if run.history.unreadable:
        advice = "see what is at that path; the page shows the run without it"
        found.append(JobProblem(Kind.UNREADABLE, "warning", run.history.unreadable, advice, run=run.run_id))
    if run.alive and run.exclusion is None:
        found += _no_difference(run, job)
        for rule in (
            _stalled,
            _discarded,
            _failures,
            _shares,
            _many_samples,
            _environment_restarts,
            _mismatch,
            _not_finite,
            _lag,
            _early_warnings,
        ):
            found += rule(run, now)
    elif run.exclusion is None and run.history.discarded.get("notable") and not _has_all_steps(run):
        found += [*_no_difference(run, job), *_discarded(run, now), *_failures(run, now)]  # nothing shipped to its end
    return [_with_job(problem, job) for problem in found]


def _has_all_steps(run: RunFacts) -> bool:
    return run.history.steps is not None and run.history.step >= run.history.steps


_CAUSES: Mapping[Kind, frozenset[Kind]] = {
    Kind.FAILING_INFERENCE: frozenset({Kind.NOT_SERVING}),
    Kind.FEW_DIFFERENCES: frozenset({Kind.NO_DIFFERENCE}),
    Kind.NOTHING_SHIPS: frozenset({Kind.FAILING_ENVIRONMENT, Kind.FAILING_INFERENCE, Kind.NOT_SERVING}),
    Kind.STALLED: frozenset(
        {Kind.FAILING_ENVIRONMENT, Kind.FAILING_INFERENCE, Kind.NOT_SERVING, Kind.NO_TRAINER, Kind.NOTHING_SHIPS}
        | {Kind.NO_DIFFERENCE}
    ),
}
"""The causes of which a problem of the same run is only the effect, so that it is not shown beside them: errors, and that nothing
ships, which is as severe as the stall that it causes."""


def _is_effect(problem: JobProblem, found: Sequence[JobProblem]) -> bool:
    """Whether another of the problems `found` is the cause of this one, and says it."""
    if problem.kind is Kind.TROUBLE:
        return FAILING in problem.reason and any(
            one.kind in (Kind.FAILING_ENVIRONMENT, Kind.FAILING_INFERENCE, Kind.NOTHING_SHIPS) for one in found
        )
    if problem.kind in (Kind.NO_TRAINER, Kind.NOT_SERVING):
        role = "trainer" if problem.kind is Kind.NO_TRAINER else "inference"
        ended = sum(one.kind in _ENDED and one.worker.startswith(role) for one in found)
        return sum(one.kind is problem.kind for one in found) <= ended
    causes = _CAUSES.get(problem.kind, frozenset())
    return any(
        one.kind in causes
        and (one.severity == "error" or one.kind is Kind.NOTHING_SHIPS)
        and one.run in ("", problem.run)
        for one in found
    )


_ENDED = (Kind.WORKER_FAILED, Kind.WORKER_RESTARTING)
"""Kinds of problems of a worker that has ended: what misses it is out for that reason."""


def _with_job(problem: JobProblem, job: Path) -> JobProblem:
    """Completes commands in the advice, so that they can be pasted wherever one stands."""
    of_job = f" --job {shlex.quote(str(job))}`"
    return replace(problem, advice=_LOGS.sub(lambda found: found[1] + of_job, problem.advice))


def _of_job(job: JobFacts) -> Iterator[JobProblem]:
    if job.error:
        advice = "start the job with --resume, which repairs its directory, or see who else writes there"
        yield JobProblem(Kind.UNREADABLE, "error", job.error, advice)
    if not job.running and job.state in (State.WAITING, State.STARTING, State.RUNNING):
        reason = f"processes.json says that the job is {job.state}, and no `counterpoint run` holds its lock"
        yield JobProblem(Kind.SUPERVISOR_GONE, "error", reason, "its command was killed: start it again with --resume")
    if job.disk_bytes and job.disk_free_bytes is not None:
        for severity, (share, least) in (("error", DISK_ERROR), ("warning", DISK_WARNING)):
            if job.disk_free_bytes < least and job.disk_free_bytes < share * job.disk_bytes:
                reason = (
                    f"{job.disk_free_bytes / GIB:.1f} GiB of {job.disk_bytes / GIB:.0f} GiB are free on the job's disk"
                )
                advice = "make room, or lower keep_rollouts and keep_checkpoints: on a full disk no step is committed"
                yield JobProblem(Kind.DISK_FULL, "error" if severity == "error" else "warning", reason, advice)
                break


def _of_workers(job: JobFacts) -> Iterator[JobProblem]:
    for worker in job.workers:
        name, state, since = worker["name"], worker["state"], worker["since"]
        last_output = redact_line(str(worker.get("last_output", "")))
        died = "".join(f": {text}" for text in (worker["last_death"], last_output) if text)
        if state == State.FAILED:
            advice = f"see `counterpoint logs {name}`; then --resume"
            yield JobProblem(Kind.WORKER_FAILED, "error", f"{name} failed{died}", advice, since, worker=name)
        elif not job.running:
            continue
        elif state in (State.RESTARTING, State.EXITED, State.STUCK):
            advice = f"it is started again, max_restarts times in a row at most; see `counterpoint logs {name}`"
            yield JobProblem(Kind.WORKER_RESTARTING, "error", f"{name} is {state}{died}", advice, since, worker=name)
        elif worker["restarts"] and job.now - since < RESTART_SECONDS:
            reason = f"{name} was started again, {worker['restarts']} times so far{died}"
            advice = f"see `counterpoint logs {name}`"
            yield JobProblem(Kind.RESTARTED, "warning", reason, advice, since, worker=name)
        if worker["trouble"] and job.running:
            advice = f"it is killed and started again if it stays silent; see `counterpoint logs {name}`"
            yield JobProblem(Kind.TROUBLE, "warning", f"{name}: {worker['trouble']}", advice, worker=name)


def _of_outages(job: JobFacts) -> Iterator[JobProblem]:
    """What is out for a run: the trainer, or a server; the latter is an error only if no server is left.

    What starts for the first time is waited for as a matter of course: it is no outage yet, and its worker tells if it fails.
    """
    none_left = all(server.state in ("out", "unknown") for server in job.servers)
    for outage, runs in job.outages:
        if _starts(job, "trainer" if outage.kind is OutageKind.TRAINER else "inference"):
            continue
        run = runs[0] if len(runs) == 1 else ""
        reason = f"{outage.who} {outage.what}: {outage.reason}"
        if outage.kind is OutageKind.TRAINER:
            advice = "see `counterpoint logs trainer`; the run goes on once the trainer is back, and loses no step"
            yield JobProblem(Kind.NO_TRAINER, "error", reason, advice, outage.since, run)
        else:
            advice = "see its log; runs go on with the other servers, and take it back once it answers and holds their weights"
            yield JobProblem(Kind.NOT_SERVING, "error" if none_left else "warning", reason, advice, outage.since, run)


def _starts(job: JobFacts, role: str) -> bool:
    """Whether a worker of the role starts for the first time."""
    return any(
        worker["name"].startswith(role)
        and worker["state"] in (State.WAITING, State.STARTING)
        and not worker["restarts"]
        for worker in job.workers
    )


def _exclusion(run: RunFacts) -> Iterator[JobProblem]:
    if run.exclusion is None:
        return
    if run.exclusion.startswith("evicted"):
        advice = "remove the cause, then the run's control/evicted.txt, and start it again with --resume"
        yield JobProblem(Kind.EVICTED, "error", run.exclusion, advice, run.excluded_at, run.run_id)
    else:
        advice = "correct the run's configuration and start it again"
        yield JobProblem(Kind.REFUSED, "error", run.exclusion, advice, run.excluded_at, run.run_id)


def _stalled(run: RunFacts, now: float) -> Iterator[JobProblem]:
    """No step for much longer than steps take. A run that has none yet is its worker's trouble."""
    typical, steps = run.seconds_a_step, run.history.steps
    if typical is None or run.paused or (steps is not None and run.newest["step"] >= steps):
        return
    since = max(run.newest["time"], run.begun_at)
    overdue = max(STALL_MEDIANS * typical, STALL_SLOWEST * max(run.step_seconds), run.file.stall_warning_seconds)
    if now - since > overdue:
        reason = f"no step for {duration(now - since)}; the newest steps took {duration(typical)} each"
        advice = (
            f"see what it waits for: `counterpoint logs {run.run_id}`, and the state of the servers and the trainer"
        )
        severity: Literal["error", "warning"] = "error" if now - since > STALL_ERROR * overdue else "warning"
        yield JobProblem(Kind.STALLED, severity, reason, advice, since, run.run_id)


def _no_difference(run: RunFacts, job: Path) -> Iterator[JobProblem]:
    if (notice := run.history.no_difference) is not None:
        advice = f"{notice.advice}. Three of the worst: {show_command(job, run.run_id)}"
        yield JobProblem(Kind.NO_DIFFERENCE, "error", f"{notice}", advice, notice.since, run.run_id)


def _discarded(run: RunFacts, now: float) -> Iterator[JobProblem]:
    report = run.history.discarded
    if report.get("notable") and run.history.no_difference is None:
        advice = "see one of them: step 0 of the run's rollouts; make the task solvable, or change the filters"
        stalls = _stalled(run, now) if run.alive else ()
        severity: Literal["error", "warning"] = next((stall.severity for stall in stalls), "warning")
        yield JobProblem(Kind.NOTHING_SHIPS, severity, in_words(report), advice, report.get("time"), run.run_id)


def _failures(run: RunFacts, now: float) -> Iterator[JobProblem]:
    """Rollouts that their environment failed, or to which inference gave no answer, as shares of the newest steps' rollouts.

    Where so many have failed since the newest step that it is notable, only those count: it may be the last step.
    """
    report = run.history.discarded
    lines = [report] if report.get("notable") else [*run.lines, report] if report else run.lines
    failed, unanswered = _total(lines, "rollouts/failed"), _total(lines, "rollouts/inference_failed")
    everything = _total(lines, "rollouts/completed") + failed + unanswered
    if everything < LEAST_ROLLOUTS:
        return
    since = lines[0].get("time")
    if unanswered / everything >= FAILING_SHARE:
        reason = f"{unanswered / everything:.0%} of the newest {everything:.0f} rollouts got no answer from inference"
        advice = "see the servers: `counterpoint logs inference_0`"
        severity = _severity(unanswered / everything)
        yield JobProblem(Kind.FAILING_INFERENCE, severity, reason, advice, since, run.run_id)
    advice = "see the failed rollouts' errors, and `counterpoint logs " + run.run_id + "`"
    named = [name for name in run.names if name.startswith(PREFIX)]
    failures = sum_failures({name: line.get(name, 0) for name in named} for line in lines) if named else {}
    if failed / everything >= FAILING_SHARE:
        words = failures_in_words(failures)
        reason = f"{failed / everything:.0%} of the newest {everything:.0f} rollouts failed: {words}"
        severity = _severity(failed / everything)
        yield JobProblem(Kind.FAILING_ENVIRONMENT, severity, reason, advice, since, run.run_id)
        return
    for environment, kinds in failures.items():
        if sum(kinds.values()) >= LEAST_ROLLOUTS and not any(f"reward/{environment}/mean" in line for line in lines):
            reason = f"none of its rollouts completes: {failures_in_words({environment: kinds})}"
            yield JobProblem(Kind.FAILING_ENVIRONMENT, "error", reason, advice, since, run.run_id)


def _shares(run: RunFacts, now: float) -> Iterator[JobProblem]:
    """What is trained less than it should be, over the newest steps, because its rollouts are too old."""
    advice = lost_in_words(run.history.last_shipped) or REMEDY
    for words in shortfalls(run.lines).values():
        yield JobProblem(Kind.SHORT_OF_SHARE, "warning", words, advice, run.lines[0].get("time"), run.run_id)


def _many_samples(run: RunFacts, now: float) -> Iterator[JobProblem]:
    """What is trained again and again, since no request of a rollout extends another."""
    if words := branching.in_words(run.lines):
        yield JobProblem(Kind.MANY_SAMPLES, "warning", words, branching.ADVICE, run.lines[0].get("time"), run.run_id)


def _environment_restarts(run: RunFacts, now: float) -> Iterator[JobProblem]:
    for name in sorted(filter(_is_restarts, run.names)):
        restarted = [line for line in run.lines if line.get(name, 0) > 0]
        if restarted:
            environment = name.split("/")[1]
            reason = (
                f"workers of the environment {environment} died {_total(restarted, name):.0f} times in the newest steps"
            )
            advice = f"see `counterpoint logs {run.run_id}` for how they died; their rollouts were failed"
            yield JobProblem(Kind.ENVIRONMENT_RESTARTED, "warning", reason, advice, restarted[0]["time"], run.run_id)


def _is_restarts(name: str) -> bool:
    return name.startswith("environment/") and name.endswith("/restarts") and name.count("/") == 2


def _mismatch(run: RunFacts, now: float) -> Iterator[JobProblem]:
    """Inference and trainer disagree more and more, or altogether, or in one step all at once."""
    if (jump := run.history.shown_jump) is not None:
        yield JobProblem(Kind.MISMATCH, "warning", str(jump), mismatch.ADVICE, jump.time, run.run_id)
    if len(run.mismatch) < RISING_STEPS:
        return
    newest = statistics.median(value for _, value in run.mismatch[-RISING_STEPS:])
    before = [value for _, value in run.mismatch[:-RISING_STEPS]]
    step = run.mismatch[-RISING_STEPS][0]
    since = next((line["time"] for line in run.lines if line["step"] == step), None)
    advice = "look at staleness first; then lower the learning rate, or see whether a server has other weights"
    if newest > MOST_MISMATCH:
        reason = (
            f"mismatch KL is {scientific(newest)}: the trainer learns from tokens that its policy would hardly choose"
        )
        yield JobProblem(Kind.MISMATCH, "error", reason, advice, since, run.run_id)
    elif len(before) >= RISING_STEPS and newest >= max(RISING_LEAST, RISING_FACTOR * statistics.median(before)):
        reason = (
            f"mismatch KL rises: {scientific(newest)}, after {scientific(statistics.median(before))} some steps ago"
        )
        yield JobProblem(Kind.MISMATCH, "warning", reason, advice, since, run.run_id)


def _not_finite(run: RunFacts, now: float) -> Iterator[JobProblem]:
    if run.empty:
        shown = ", ".join(run.empty[:5])
        advice = "see the reward function and the loss; a loss or a gradient that is not finite evicts its run"
        since = run.history.last_shipped.get("time")
        yield JobProblem(
            Kind.NOT_FINITE, "error", f"not a finite number in the newest step: {shown}", advice, since, run.run_id
        )


def _lag(run: RunFacts, now: float) -> Iterator[JobProblem]:
    limits = {
        "p90": run.file.warn_p90_seconds,
        "p99": run.file.warn_p99_seconds,
        "max": run.file.warn_max_seconds,
    }
    for line in reversed(run.lines[-LAG_STEPS:]):
        above = [
            f"{name} {line[f'event_loop_lag/{name}']:.3g} s, above {limit:g} s"
            for name, limit in limits.items()
            if line.get(f"event_loop_lag/{name}", 0.0) > limit
        ]
        if above:
            worst = slow_spots_of([line]).worst(2)
            blame = f"; of it {slow_spots_in_words(worst)}" if worst else ""
            reason = f"the event loop was late in step {line['step']}: {', '.join(above)}{blame}"
            advice = "see the loop's view for the code that made it late, and docs/debugging.md for what to do about each kind"
            yield JobProblem(Kind.LAG, "warning", reason, advice, line["time"], run.run_id)
            return


def _early_warnings(run: RunFacts, now: float) -> Iterator[JobProblem]:
    for each in run.history.early_warnings:
        about = f"{each.about}: " if each.about else ""
        reason = f"{about}{each.reason} (since step {each.since})"
        yield JobProblem(Kind(each.sign.value), "warning", reason, each.advice, each.time, run.run_id)


def _total(lines: Sequence[Line], name: str) -> float:
    return float(sum(line.get(name, 0) for line in lines))


def _severity(share: float) -> Literal["error", "warning"]:
    return "error" if share >= BROKEN_SHARE else "warning"
