"""The summary of a job: its numbers, and its tables."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from counterpoint.cli.display.progress import describe_step
from counterpoint.cli.display.status_tables import status_parts
from counterpoint.cli.display.summary_tables import print_summary
from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.status import read_status
from counterpoint.job.reading.summary import lag_quantiles, summarize, summarize_runs
from counterpoint.transport.files.atomic import publish_directory
from tests.support.jobs import shipped_line, write_lines
from tests.support.past_jobs import history_of, write_discarded

OWN_TIME = "environment/guess/agent/own_seconds/mean"


@pytest.mark.parametrize(("steps", "edge"), [(1, 1), (2, 1), (3, 1), (9, 4), (10, 5), (11, 5)])
def test_the_first_and_the_last_steps_of_a_short_run_do_not_overlap(tmp_path: Path, steps: int, edge: int) -> None:
    write_lines(
        tmp_path / "run_test" / "metrics.jsonl", [shipped_line(step, 100.0 + step) for step in range(1, steps + 1)]
    )
    summary = summarize(history_of(tmp_path), tmp_path, elapsed=1.0, outcome="done")
    assert summary["reward"]["edge_steps"] == edge
    rewards = [shipped_line(step, 0.0)["reward/mean"] for step in range(1, steps + 1)]
    assert summary["reward"]["first"] == pytest.approx(sum(rewards[:edge]) / edge)
    assert summary["reward"]["last"] == pytest.approx(sum(rewards[-edge:]) / edge)


def test_the_summary_adds_up(past: Path) -> None:
    summary = summarize(history_of(past), past, elapsed=61.0, outcome="done")
    assert summary["steps"] == {"shipped": 20, "trained": 19, "wanted": 20, "counted_from": 1}
    assert summary["reward"] == {"first": pytest.approx(0.15), "last": pytest.approx(0.9), "edge_steps": 5}
    assert summary["rollouts"] == {
        "completed": 1280,
        "failed": 20,
        "inference_failed": 0,
        "cancelled": 0,
        "filtered": 60,
    }
    assert summary["tokens_per_second"] == pytest.approx(500)  # 1000 a step of two seconds
    assert summary["mismatch_kl"] == {"max": pytest.approx(19e-6), "mean": pytest.approx(10e-6)}
    json.dumps(summary)


def test_the_summary_says_where_the_time_went(tmp_path: Path) -> None:
    phases = {"phase/generation": 3.0, "phase/wait_trainer": 0.5, "phase/commit": 0.5}
    agents = {"agent/seconds": 6.2, "agent/start_seconds": 5.1, "agent/own_seconds": 5.9}
    phases |= {f"environment/guess/{name}/mean": value for name, value in agents.items()}
    write_lines(
        tmp_path / "run_test" / "metrics.jsonl", [shipped_line(step, 100.0 + step, **phases) for step in (1, 2)]
    )
    history = History.of(tmp_path, "test", 2)
    history.refresh()
    summary = summarize(history, tmp_path, elapsed=8.0, outcome="done")
    assert summary["phase_seconds"] == {"generation": 6.0, "wait_trainer": 1.0, "commit": 1.0}
    console = Console(file=io.StringIO(), width=120)
    print_summary(summary, {}, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert summary["agents"] == {"guess": agents}
    assert "guess: of a rollout's 6.2 s the program takes 5.9 s itself" in shown
    assert "agents' own time 95% of a rollout" in describe_step(history.last_shipped, history)
    assert "agents" not in describe_step(history.last_shipped | dict.fromkeys(phases, 1.0) | {OWN_TIME: 0.4}, history)
    status = Console(file=io.StringIO(), width=200)
    for part in status_parts(read_status(tmp_path)):
        status.print(part)
    assert "5.1 s of them before its first request" in status.file.getvalue()  # type: ignore[attr-defined]
    assert "generation 75 %, waiting for the trainer 12 %, saving the state 12 %" in shown


def test_what_no_step_accounts_for_yet_is_summed_up_and_explained(past: Path) -> None:
    write_discarded(past, step=20)
    summary = summarize(history_of(past), past, elapsed=61.0, outcome="interrupted")
    assert summary["rollouts"] == {
        "completed": 1292,
        "failed": 520,
        "inference_failed": 0,
        "cancelled": 0,
        "filtered": 72,
    }
    assert (
        summary["discarded"]
        == "512 rollouts discarded since step 20 (500 failed, 12 filtered): no rollout of 4 survived"
    )
    write_discarded(past, step=20, notable=False)
    assert summarize(history_of(past), past, elapsed=61.0, outcome="interrupted")["discarded"] is None
    write_discarded(past, step=19)  # which step 20 accounts for
    assert summarize(history_of(past), past, elapsed=61.0, outcome="done")["rollouts"]["failed"] == 20


def test_the_time_of_a_resumed_job_says_of_what_it_is(past: Path) -> None:
    history = history_of(past)
    for since, expected in ((0.0, "1 min 01 s\n"), (120.0, "1 min 01 s in this session\n")):
        history.since = since
        console = Console(file=io.StringIO(), width=100)
        print_summary(summarize(history, past, elapsed=61.0, outcome="done"), {}, console)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert expected in "".join(f"{line.rstrip()}\n" for line in shown.splitlines())


@pytest.mark.parametrize("several", [True, False])
def test_a_reason_is_shown_as_it_is(tmp_path: Path, several: bool) -> None:
    history, reason = history_of(tmp_path), "failed: no file [/usr/lib/x] of [bold]"
    one = summarize(history, tmp_path, elapsed=1.0, outcome=reason)
    summary = summarize_runs([history], {}, tmp_path, elapsed=1.0, outcome=reason) if several else one
    console = Console(file=io.StringIO(), width=120)
    print_summary(summary, {}, console)
    assert reason in console.file.getvalue()  # type: ignore[attr-defined]


def test_nothing_measured_is_said_so(tmp_path: Path) -> None:
    summary = summarize(history_of(tmp_path), tmp_path, elapsed=1.0, outcome="failed")
    assert summary["reward"]["first"] is None
    assert summary["event_loop_lag_seconds"] == {"p50": None, "p99": None, "max": None}
    console = Console(file=io.StringIO(), width=100)
    print_summary(summary, {}, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0 trained, 0 sent" in shown
    assert "reward" not in shown, "of a run without a step, it says nothing"


def test_lag_over_the_run_lies_between_what_the_steps_saw(past: Path) -> None:
    lag = lag_quantiles(history_of(past))
    assert lag["max"] == pytest.approx(0.025)
    assert lag["p50"] == pytest.approx(0.0005, rel=0.1)
    assert lag["p99"] is not None
    assert 0.002 < lag["p99"] < 0.025


def history_with_lags(tmp_path: Path, *lags: Mapping[str, float]) -> History:
    """A run of one step for each of these, which are the metrics of its lag."""
    usual = dict.fromkeys(("min", "median", "p90", "p99", "max"), 0.1)
    lines = [
        {"step": step, "time": 1.0} | {f"event_loop_lag/{name}": value for name, value in {**usual, **lag}.items()}
        for step, lag in enumerate(lags, 1)
    ]
    write_lines(tmp_path / "run_test" / "metrics.jsonl", lines)
    return history_of(tmp_path)


def test_a_step_counts_in_the_lag_by_its_samples(tmp_path: Path) -> None:
    slow = dict.fromkeys(("min", "median", "p90", "p99", "max"), 0.5)
    for count, p99 in ((9, 0.1), (11, 0.5)):
        lag = lag_quantiles(history_with_lags(tmp_path / str(count), {"n": 1000 - count}, {**slow, "n": count}))
        assert lag == {"p50": pytest.approx(0.1), "p99": pytest.approx(p99), "max": 0.5}
    spread = {"min": 0.0, "median": 0.2, "p90": 0.6, "p99": 0.8, "max": 1.0, "n": 10}
    lag = lag_quantiles(history_with_lags(tmp_path / "spread", spread, spread))
    assert lag == {"p50": pytest.approx(0.2), "p99": pytest.approx(0.8), "max": 1.0}


@pytest.mark.parametrize("count", [-1, 0, 0.5, -1e17])
def test_what_is_no_count_of_samples_is_left_out_of_the_lag(tmp_path: Path, count: float) -> None:
    assert lag_quantiles(history_with_lags(tmp_path / "one", {"n": count}))["p50"] is None
    lag = lag_quantiles(history_with_lags(tmp_path / "two", {"n": count, "p99": 0.3}, {"n": 5, "max": 0.2}))
    assert lag["p50"] == pytest.approx(0.1)
    assert lag["max"] == 0.2


def test_the_lag_of_any_number_of_samples_takes_little_memory(tmp_path: Path) -> None:
    history = history_with_lags(tmp_path, *[{"n": 10**17}] * 20)
    tracemalloc.start()
    lag = lag_quantiles(history)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lag["p50"] == pytest.approx(0.1)
    assert peak < 2**20


@pytest.fixture
def two(past: Path) -> dict[str, History]:
    """The past run, and another that has come to its third step; by their ids."""
    write_lines(past / "run_late" / "metrics.jsonl", [shipped_line(step, 200.0 + step) for step in range(1, 4)])
    return {name: History.of(past, name, steps) for name, steps in (("test", 20), ("late", 9))}


def test_the_summary_of_several_runs_has_a_line_for_each(two: dict[str, History], past: Path) -> None:
    for history in two.values():
        history.refresh()
    two["late"].shipped[3]["phase/\x1b[2J"] = 100.0
    endings = {"test": "done", "late": "evicted: it sent NaN"}
    summary = summarize_runs(list(two.values()), endings, past, 61.0, "done")
    assert {name: run["steps"]["shipped"] for name, run in summary["runs"].items()} == {"test": 20, "late": 3}
    json.dumps(summary)
    console = Console(file=io.StringIO(), width=200)
    print_summary(summary, {}, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("done, 1 min 01 s", "evicted: it sent NaN", "19/20", "0/9", "0.150 → 0.900"):
        assert part in shown
    assert r"time: \x1b[2J" in shown, "a guest names its phases"


def test_failures_are_told_by_environment_and_kind(tmp_path: Path) -> None:
    (tmp_path / "run_test").mkdir()
    lines = [
        shipped_line(step, 1.0)
        | {"rollouts/failed": 94, "failures/reverse/the reward is nan": 56, "failures/reverse/KeyError": 38}
        for step in (1, 2)
    ]
    (tmp_path / "run_test" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    errors = [
        None,
        "KeyError: 'x' (in score, my.py:3)",
        f"the reward is nan; expected\n[bold]a number[/bold]{' word' * 100}",
    ]
    records = [{"environment": name, "error": error} for name in ("other", "reverse") for error in errors]
    with publish_directory(tmp_path / "run_test" / "rollouts" / "step_2", durable=False) as step:
        (step / "rollouts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    history = History.of(tmp_path, "test", 2)
    history.refresh()
    assert "failed 94: 56 the reward is nan, 38 KeyError (in reverse)  " in describe_step(history.shipped[1], history)
    summary = summarize(history, tmp_path, 1.0, "done")
    assert summary["failures"] == {"reverse": {"the reward is nan": 112, "KeyError": 76}}
    words, example = (
        "112 the reward is nan, 76 KeyError (in reverse)",
        "the reward is nan; expected [bold]a number[/bold] word",
    )
    assert summary["failure_example"].startswith(example)
    assert " word… word" in summary["failure_example"]
    for shown in (summary, summarize_runs([history, history], {}, tmp_path, 1.0, "done")):
        console = Console(file=io.StringIO(), width=200)
        print_summary(shown, {}, console)
        assert words in console.file.getvalue()  # type: ignore[attr-defined]
        assert "such as" in console.file.getvalue()  # type: ignore[attr-defined]
        assert example in console.file.getvalue()  # type: ignore[attr-defined]
    console = Console(file=io.StringIO(), width=200)
    for part in status_parts(read_status(tmp_path)):
        console.print(part)
    assert words in console.file.getvalue()  # type: ignore[attr-defined]
    assert read_status(tmp_path).as_json()["runs"][0]["failures"] == summary["failures"]
