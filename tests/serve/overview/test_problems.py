"""Each problem is found by what it shows in, and a healthy job has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.job.reading.activity.fleet import ViewedServer
from counterpoint.job.reading.job_facts import JobFacts, RunFacts
from counterpoint.job.reading.metrics.balance import Idle
from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.metrics.newest_steps import KEPT_STEPS, KEPT_TRAINED
from counterpoint.job.reading.run_file import RunFile
from counterpoint.orchestrator.early_warnings.rules import Sign
from counterpoint.orchestrator.rollouts.branching import FACTOR, SAMPLES
from counterpoint.orchestrator.step.differences import Notice
from counterpoint.serve.readers.problems import JobProblem, Kind, problems_of
from counterpoint.trainer.telemetry.mismatch import SHOWN_STEPS, Jump
from counterpoint.transport import outages
from counterpoint.transport.outages import OpenOutage
from tests.support.jobs import EARLY_WARNING
from tests.support.synthetic_jobs import shipped_lines, trained_lines

NOW = 1_000_000.0
GIB = 2**30


def healthy_run(steps: int = 60, seed: int = 0, late: float = 1.0) -> RunFacts:
    """A run like those of `tests/support/synthetic_jobs.py`, whose newest step ended `late` seconds ago."""
    lines = list(shipped_lines(steps, NOW - late, seed))
    trained = list(trained_lines(lines, seed))
    history = History("test", steps=steps + 100)
    history.shipped = {line["step"]: line for line in lines[-KEPT_STEPS:]}
    history.trained = {line["step"]: line for line in trained[-1:]}
    mismatch = tuple((line["step"], line["mismatch_kl"]) for line in trained[-KEPT_TRAINED:])
    return RunFacts("test", history, RunFile(steps + 100), state="running", alive=True, mismatch=mismatch)


def worker(**fields: Any) -> dict[str, Any]:
    texts = {"status": "", "trouble": "", "last_death": ""}
    return {"name": "trainer", "state": "ready", "since": NOW - 5000, "restarts": 0, "pid": 1, **texts} | fields


def healthy_job(*runs: RunFacts, **fields: Any) -> JobFacts:
    base = JobFacts(
        Path("job"), NOW, running=True, state="running", workers=[worker()], runs=[*runs],
        disk_bytes=500 * GIB, disk_free_bytes=200 * GIB,
    )  # fmt: skip
    return replace(base, **fields)


def changed(run: RunFacts, metrics: dict[str, Any], newest: int = KEPT_STEPS) -> RunFacts:
    """The run with other metrics in its newest lines; None removes one."""
    steps = sorted(run.history.shipped)[-newest:]
    for step in steps:
        line = {**run.history.shipped[step], **metrics}
        run.history.shipped[step] = {name: value for name, value in line.items() if value is not None}
    return run


def only(job: JobFacts) -> JobProblem:
    problems = problems_of(job)
    assert len(problems) == 1, problems
    assert problems[0].reason
    assert problems[0].advice
    assert problems[0].advice.count("`counterpoint logs ") == problems[0].advice.count(" --job job`"), "to be pasted"
    return problems[0]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 80), late=st.floats(0, 30))
def test_a_healthy_job_has_no_problem(seed: int, steps: int, late: float) -> None:
    assert problems_of(healthy_job(healthy_run(steps, seed, late))) == []


def test_a_run_without_a_step_is_no_problem() -> None:
    assert (
        problems_of(healthy_job(RunFacts("new", History("new", 10), alive=True, state="before its first step"))) == []
    )


def mismatched(*values: float) -> RunFacts:
    return replace(healthy_run(), mismatch=tuple(enumerate(values, 49)))


RUNS: dict[str, tuple[Any, Kind, str]] = {
    "a stall": (lambda: healthy_run(late=300), Kind.STALLED, "warning"),
    "a long stall": (lambda: healthy_run(late=3000), Kind.STALLED, "error"),
    "an eviction": (
        lambda: replace(healthy_run(), exclusion="evicted: its loss is nan", excluded_at=NOW), Kind.EVICTED, "error",
    ),
    "an eviction of a run that has ended": (
        lambda: replace(healthy_run(late=9e4), alive=False, exclusion="evicted: by hand"), Kind.EVICTED, "error",
    ),
    "a refusal": (lambda: replace(healthy_run(), exclusion="refused: no adapter"), Kind.REFUSED, "error"),
    "some failures": (
        lambda: changed(healthy_run(), {"rollouts/failed": 40, "failures/guess-number/KeyError": 40}),
        Kind.FAILING_ENVIRONMENT, "warning",
    ),
    "failures only": (
        lambda: changed(healthy_run(), {"rollouts/failed": 400, "failures/guess-number/KeyError": 400}),
        Kind.FAILING_ENVIRONMENT, "error",
    ),
    "one of the environments fails": (
        lambda: changed(healthy_run(), {"failures/guess-number/KeyError": 5, "reward/guess-number/mean": None}),
        Kind.FAILING_ENVIRONMENT, "error",
    ),
    "no answers": (lambda: changed(healthy_run(), {"rollouts/inference_failed": 60}), Kind.FAILING_INFERENCE, "warning"),
    "a worker of an environment died": (
        lambda: changed(healthy_run(), {"environment/code/restarts": 1}, newest=2), Kind.ENVIRONMENT_RESTARTED, "warning",
    ),
    "lag": (lambda: changed(healthy_run(), {"event_loop_lag/p99": 6.0}, newest=2), Kind.LAG, "warning"),
    "mismatch rises": (lambda: mismatched(*[0.001] * 8, 0.01, 0.03, 0.05, 0.06), Kind.MISMATCH, "warning"),
    "mismatch jumps": (lambda: jumped(0), Kind.MISMATCH, "warning"),
    "mismatch is high": (lambda: mismatched(*[0.5] * 4), Kind.MISMATCH, "error"),
    "not a number": (lambda: replace(healthy_run(), empty=("grad_norm",)), Kind.NOT_FINITE, "error"),
}  # fmt: skip


def jumped(steps: int) -> RunFacts:
    """A run in which one step's mismatch was far beyond the others, so many steps ago."""
    run = healthy_run()
    run.history.mismatch_jump = Jump(max(run.history.trained) - steps, 0.14, 3e-6, (("7-1", 2.0), ("7-0", 0.5)), NOW)
    return run


def test_a_jump_of_the_mismatch_names_its_rollouts_and_is_over_after_many_steps() -> None:
    problem = only(healthy_job(jumped(SHOWN_STEPS - 1)))
    assert "7-1 (2), 7-0 (0.5)" in problem.reason
    assert problems_of(healthy_job(jumped(SHOWN_STEPS))) == []


@pytest.mark.parametrize("name", RUNS)
def test_a_problem_of_a_run_is_found(name: str) -> None:
    run, kind, severity = RUNS[name]
    problem = only(healthy_job(run()))
    assert (problem.kind, problem.severity, problem.run) == (kind, severity, "test")


def test_files_that_cannot_be_read_are_a_problem() -> None:
    run = healthy_run()
    run.history.unreadable = "metrics.jsonl is a FIFO; expected a regular file"
    assert only(healthy_job(run)).reason == run.history.unreadable
    assert only(healthy_job(error="job.json is damaged")).kind is Kind.UNREADABLE


def test_what_is_discarded_without_end_is_a_problem() -> None:
    run = healthy_run()
    run.history.discarded = {
        "step": 60,
        "time": NOW,
        "discarded": 900,
        "reason": "no rollout survived",
        "notable": True,
    }
    assert only(healthy_job(run)).kind is Kind.NOTHING_SHIPS
    run.history.discarded["notable"] = False
    assert problems_of(healthy_job(run)) == []


@pytest.mark.parametrize(("late", "severity"), [(1.0, "warning"), (300.0, "warning"), (3000.0, "error")])
def test_a_stall_of_which_the_cause_is_known_is_one_problem(late: float, severity: str) -> None:
    run = healthy_run(late=late)
    report = {"step": 60, "time": NOW, "discarded": 900, "reason": "their advantages are 0", "notable": True}
    run.history.discarded = report
    problem = only(healthy_job(run))
    assert (problem.kind, problem.severity) == (Kind.NOTHING_SHIPS, severity)


def failing(run: RunFacts) -> RunFacts:
    """The run, of which no rollout has completed since its newest step."""
    counts = {"rollouts/failed": 568, "failures/guess-number/KeyError": 568}
    report = {"step": run.history.step, "time": NOW, "discarded": 568, "reason": "no rollout survived", "notable": True}
    run.history.discarded = report | counts
    return run


def test_a_run_that_ended_while_everything_failed_has_a_problem() -> None:
    ended = replace(failing(healthy_run()), alive=False, state="not running")
    assert only(healthy_job(ended)).kind is Kind.FAILING_ENVIRONMENT
    done = failing(healthy_run())
    done.history.steps = done.history.step
    assert problems_of(healthy_job(replace(done, alive=False))) == []


def test_one_cause_is_one_problem() -> None:
    late = failing(healthy_run(late=3000))
    stuck = worker(name="orchestrator", trouble="no progress since 12:00:00; its rollouts fail: KeyError")
    assert only(healthy_job(late, workers=[stuck])).kind is Kind.FAILING_ENVIRONMENT
    blocked = worker(name="orchestrator", trouble="its event loop has been blocked at score (my.py:3)")
    kinds = {problem.kind for problem in problems_of(healthy_job(late, workers=[blocked]))}
    assert kinds == {Kind.FAILING_ENVIRONMENT, Kind.TROUBLE}
    away, gone = outage(outages.OutageKind.TRAINER, "the trainer"), worker(state="restarting", restarts=1)
    out = healthy_job(healthy_run(late=3000), workers=[gone], outages=[(away, ["test"])])
    assert only(out).kind is Kind.WORKER_RESTARTING


@pytest.mark.parametrize(
    "why",
    [
        {"paused": True},
        {"alive": False, "state": "not running"},
        {"begun_at": NOW - 5},
        {"file": RunFile(160, stall_warning_seconds=400.0)},
    ],
)
def test_a_run_that_need_not_make_steps_is_not_stalled(why: dict[str, Any]) -> None:
    assert problems_of(healthy_job(replace(healthy_run(late=300), **why))) == []


def test_a_run_whose_steps_are_all_shipped_is_not_stalled() -> None:
    run = healthy_run(late=3000)
    run.history.steps = run.history.step
    assert problems_of(healthy_job(run)) == []


def test_steps_may_take_as_long_as_they_did_before() -> None:
    run = healthy_run(late=300)
    slow = sorted(run.history.shipped)[-3]
    for step, line in run.history.shipped.items():
        if step < slow:
            line["time"] -= 200
    assert problems_of(healthy_job(run)) == []


def test_mismatch_that_falls_or_is_small_is_no_problem() -> None:
    for values in ([0.1] * 6 + [0.05] * 6, [1e-6] * 8 + [1e-3] * 4, [0.01] * 8 + [0.021] * 4):
        assert problems_of(healthy_job(mismatched(*values))) == []


@pytest.mark.parametrize(
    ("fields", "kind", "severity"),
    [
        ({"state": "failed", "last_death": "killed by SIGKILL"}, Kind.WORKER_FAILED, "error"),
        ({"state": "failed", "last_death": "exit code 1", "last_output": "no such head"}, Kind.WORKER_FAILED, "error"),
        ({"state": "restarting", "restarts": 1}, Kind.WORKER_RESTARTING, "error"),
        ({"state": "stuck"}, Kind.WORKER_RESTARTING, "error"),
        ({"restarts": 2, "since": NOW - 60, "last_death": "exit code 1"}, Kind.RESTARTED, "warning"),
        ({"trouble": "silent since 12:00:01"}, Kind.TROUBLE, "warning"),
    ],
)
def test_a_problem_of_a_worker_is_found(fields: dict[str, Any], kind: Kind, severity: str) -> None:
    problem = only(healthy_job(workers=[worker(**fields)]))
    assert (problem.kind, problem.severity, problem.worker) == (kind, severity, "trainer")
    assert fields.get("last_death", "") in problem.reason
    assert fields.get("last_output", "") in problem.reason


def test_a_restart_is_forgotten() -> None:
    assert problems_of(healthy_job(workers=[worker(restarts=2, since=NOW - 5000, last_death="exit code 1")])) == []


@pytest.mark.parametrize(("free", "severity"), [(1, "error"), (15, "warning"), (24, None), (200, None)])
def test_a_disk_that_is_nearly_full_is_a_problem(free: int, severity: str | None) -> None:
    problems = problems_of(healthy_job(disk_free_bytes=free * GIB, disk_bytes=500 * GIB))
    assert [problem.severity for problem in problems if problem.kind is Kind.DISK_FULL] == [severity] * (
        severity is not None
    )


def server(url: str, state: str) -> ViewedServer:
    return ViewedServer(url, [("test", NOW, {"url": url, "state": state})])


def outage(kind: outages.OutageKind, who: str) -> OpenOutage:
    return OpenOutage(kind, who, "takes no traffic", NOW - 9, "no answer")


@pytest.mark.parametrize(
    ("states", "severities"),
    [
        (["serving", "loading", "unknown"], []),
        (["serving", "out"], ["warning"]),
        (["out", "out"], ["error", "error"]),
    ],
)
def test_servers_out_of_service_are_a_problem(states: list[str], severities: list[str]) -> None:
    servers = [server(f"http://{place}", state) for place, state in enumerate(states)]
    out = [(outage(outages.OutageKind.SERVER, each.url), ["test"]) for each in servers if each.state == "out"]
    problems = problems_of(healthy_job(servers=servers, outages=out))
    assert [problem.severity for problem in problems] == severities
    assert {problem.kind for problem in problems} <= {Kind.NOT_SERVING}
    assert all(problem.since == NOW - 9 and "no answer" in problem.reason for problem in problems)


def test_a_trainer_that_is_out_is_an_error_of_the_runs_that_miss_it() -> None:
    out = outage(outages.OutageKind.TRAINER, "the trainer at x")
    for runs, named in ((["test"], "test"), (["test", "other"], "")):
        problem = only(healthy_job(outages=[(out, runs)]))
        assert (problem.kind, problem.severity, problem.run, problem.since) == (
            Kind.NO_TRAINER,
            "error",
            named,
            NOW - 9,
        )
        assert "no answer" in problem.reason


@pytest.mark.parametrize(
    ("state", "restarts", "is_problem"), [("starting", 0, False), ("waiting", 0, False), ("starting", 1, True)]
)
@pytest.mark.parametrize(
    ("role", "kind"), [("inference_0", outages.OutageKind.SERVER), ("trainer", outages.OutageKind.TRAINER)]
)
def test_what_starts_for_the_first_time_is_waited_for_without_a_problem(
    role: str, kind: outages.OutageKind, state: str, restarts: int, is_problem: bool
) -> None:
    workers = [worker(name=role, state=state, restarts=restarts)]
    job = healthy_job(workers=workers, outages=[(outage(kind, "x"), ["test"])])
    assert any(problem.kind in (Kind.NOT_SERVING, Kind.NO_TRAINER) for problem in problems_of(job)) == is_problem


def test_a_supervisor_that_was_killed_is_a_problem_and_one_that_ended_is_none() -> None:
    assert only(healthy_job(running=False)).kind is Kind.SUPERVISOR_GONE
    assert problems_of(healthy_job(running=False, state="stopped")) == []


def test_errors_come_first_and_then_the_newest() -> None:
    stalled, evicted = healthy_run(late=300), replace(healthy_run(), exclusion="evicted: x", excluded_at=1.0)
    kinds = [problem.kind for problem in problems_of(healthy_job(stalled, evicted))]
    assert kinds == [Kind.EVICTED, Kind.STALLED]


def test_what_is_short_of_its_share_since_it_is_too_old() -> None:
    counts = {"trained/fast/1-2s": 12, "trained/slow/8-16s": 4, "stale/slow/8-16s": 8}
    shares = {"examples/fast/share": 0.5, "examples/slow/share": 0.5}
    problem = only(healthy_job(changed(healthy_run(), counts | shares)))
    assert (problem.kind, problem.severity, problem.run) == (Kind.SHORT_OF_SHARE, "warning", "test")
    assert "slow is 25% of what is trained, where its ratio says 50%" in problem.reason
    assert "max_off_policy_steps" in problem.advice


def test_requests_that_do_not_extend_each_other_are_said_with_their_factor() -> None:
    problem = only(healthy_job(changed(healthy_run(), {SAMPLES: 20.0, FACTOR: 5.2})))
    assert (problem.kind, problem.severity, problem.run) == (Kind.MANY_SAMPLES, "warning", "test")
    assert "20.0 samples" in problem.reason
    assert "5.2 times" in problem.reason
    assert "reasoning_content" in problem.advice
    assert not problems_of(healthy_job(changed(healthy_run(), {SAMPLES: 2.0, FACTOR: 1.4})))


def test_groups_without_a_difference_are_a_problem_with_its_remedy() -> None:
    run = healthy_run()
    run.history.no_difference = Notice(
        64, "in 60 of them each rollout has the reward 0", "take easier examples", NOW - 5
    )
    run.history.discarded = {"step": run.history.step, "discarded": 999, "reason": "filtered", "notable": True}
    problem = only(healthy_job(run))
    assert (problem.kind, problem.severity, problem.since) == (Kind.NO_DIFFERENCE, "error", NOW - 5)
    assert "each rollout has the reward 0" in problem.reason
    assert problem.advice == (
        "take easier examples. Three of the worst: counterpoint show job --run test --no-difference"
    )


def test_early_warnings_are_problems_with_their_advice() -> None:
    problem = only(healthy_job(changed(healthy_run(), {"early_warnings": [EARLY_WARNING]}, newest=1)))
    assert (problem.kind, problem.severity, problem.since) == (Kind.CUT, "warning", 20.0)
    assert problem.reason == "math: 95% of the answers are cut at their limit (since step 12)"
    assert problem.advice == "raise sampling.max_tokens"
    past = changed(healthy_run(), {"early_warnings": [EARLY_WARNING]}, newest=2)
    past.history.shipped[past.history.step].pop("early_warnings")
    assert problems_of(healthy_job(past)) == []
    assert {sign.value for sign in Sign} <= {kind.value for kind in Kind}


def test_few_differences_are_the_effect_of_none() -> None:
    few = EARLY_WARNING | {"sign": "few-differences", "about": ""}
    run = changed(healthy_run(), {"early_warnings": [few]}, newest=1)
    assert only(healthy_job(run)).kind is Kind.FEW_DIFFERENCES
    run.history.no_difference = Notice(64, "each rollout has the reward 0", "take easier examples", NOW - 5)
    assert only(healthy_job(run)).kind is Kind.NO_DIFFERENCE


def test_who_waits_is_said_of_a_job_of_one_run() -> None:
    run = replace(healthy_run(), idle=Idle(0.5, 0.0))
    workers = [worker(name="trainer"), worker(name="inference_0")]
    job = healthy_job(run, workers=workers, running=True)
    assert job.balance.startswith("the trainer waits 50%")
    assert healthy_job(replace(run, idle=Idle(0.0, 0.5)), workers=workers, running=True).balance == (
        "the servers wait 50%: trainer.processes = 2"
    )
    assert not healthy_job(replace(run, is_guest=True), workers=workers, running=True).balance
    assert not healthy_job(run, run, workers=workers, running=True).balance
    assert not healthy_job(replace(run, idle=Idle(None, None)), workers=workers, running=True).balance
