"""Reading a job's past, and what is made of it: summary, progress, curves, status."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import cli.display.progress
from cli.display.plot import plot
from cli.display.progress import LiveProgress, PlainProgress, choose, describe_step
from cli.display.status_tables import status_parts
from cli.display.summary_tables import print_summary
from cli.status import main as status
from cluster.events import State
from cluster.job import WorkerView
from job.errors import UserError
from job.inspection.history import History
from job.inspection.status import read_status
from job.inspection.summary import lag_quantiles, summarize, summarize_runs
from job.number_format import duration
from orchestrator.loop_health.slow_spots import METRIC
from tests.support.jobs import shipped_line, trained_line, write_lines
from transport.files.lock import take_lock


def history_of(output: Path) -> History:
    history = History.of(output, "test", 20)
    history.refresh()
    return history


def test_history_follows_files_that_grow_and_are_replaced(tmp_path: Path) -> None:
    history = History.of(tmp_path, "test")
    assert history.refresh() == []
    path = tmp_path / "run_test" / "metrics.jsonl"
    write_lines(path, [shipped_line(1, 1.0), shipped_line(2, 2.0)])
    assert [line["step"] for line in history.refresh()] == [1, 2]
    with path.open("a") as file:
        file.write('{"step": 3, "ti')
    assert history.refresh() == []
    with path.open("a") as file:
        file.write('me": 3.0}\n')
    assert [line["step"] for line in history.refresh()] == [3]
    replacement = path.with_suffix(".new")
    write_lines(replacement, [shipped_line(step, float(step)) for step in range(1, 5)])
    replacement.replace(path)
    assert [line["step"] for line in history.refresh()] == [4]


def test_what_a_machines_end_left_is_passed_over(past: Path) -> None:
    path = past / "run_test" / "metrics.jsonl"
    path.write_bytes(
        path.read_bytes() + b'\0\0\0\n[1]\n{"step": 21}\n' + json.dumps(shipped_line(21, 150.0)).encode() + b"\n"
    )
    (past / "run_test" / "discarded.json").write_bytes(b"\0\0")
    history = history_of(past)
    assert (history.step, len(history.shipped), history.discarded) == (21, 21, {})


def test_steps_that_a_resume_takes_back_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "trainer" / "metrics.jsonl"
    write_lines(path, [trained_line(step) for step in range(1, 5)])
    history = history_of(tmp_path)
    assert history.last_trained["step"] == 4
    rewound = path.with_suffix(".new")
    write_lines(rewound, [trained_line(step) for step in range(1, 3)])
    rewound.replace(path)
    history.refresh()
    assert sorted(history.trained) == [1, 2]


def test_another_runs_training_is_not_ours(past: Path) -> None:
    history = history_of(past)
    assert len(history.trained) == 19
    assert history.trained[5]["mismatch_kl"] == pytest.approx(5e-6)


def test_the_summary_adds_up(past: Path) -> None:
    summary = summarize(history_of(past), past, elapsed=61.0, outcome="done")
    assert summary["steps"] == {"shipped": 20, "trained": 19, "wanted": 20}
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
    assert "generation 75 %, waiting for the trainer 12 %, commit 12 %" in shown


def test_a_resumed_jobs_rate_leaves_out_the_pause(tmp_path: Path) -> None:
    lines = [shipped_line(1, 100.0), shipped_line(2, 102.0), shipped_line(3, 9000.0), shipped_line(4, 9001.0)]
    write_lines(tmp_path / "run_test" / "metrics.jsonl", lines)
    history = History.of(tmp_path, "test", since=8000.0)
    history.refresh()
    assert history.tokens_per_second() == pytest.approx(1000)


def test_pauses_between_sessions_are_left_out_and_a_sessions_first_step_counts(tmp_path: Path) -> None:
    """Each of these steps took 2 s, the first of a session too, which knows since when it has been generating."""
    times = [(100.0, 2.0), (102.0, 4.0), (9000.0, 2.0), (9002.0, 4.0)]
    lines = [shipped_line(step, time, uptime_seconds=uptime) for step, (time, uptime) in enumerate(times, 1)]
    write_lines(tmp_path / "run_test" / "metrics.jsonl", lines)
    history = history_of(tmp_path)
    assert history.tokens_per_second() == pytest.approx(500)
    assert history.tokens_per_second(steps=2) == pytest.approx(500)
    history.since = 8990.0
    assert history.tokens_per_second() == pytest.approx(500)


def lose(output: Path, step: int, notable: bool = True) -> None:
    report = {"step": step, "time": 1.0, "discarded": 512, "reason": "no rollout\nof 4 survived", "notable": notable}
    report |= {"rollouts/completed": 12, "rollouts/failed": 500, "rollouts/filtered": 12}
    (output / "run_test").mkdir(parents=True, exist_ok=True)
    (output / "run_test" / "discarded.json").write_text(json.dumps(report))


def test_what_no_step_accounts_for_yet_is_summed_up_and_explained(past: Path) -> None:
    lose(past, step=20)
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
    lose(past, step=20, notable=False)
    assert summarize(history_of(past), past, elapsed=61.0, outcome="interrupted")["discarded"] is None
    lose(past, step=19)  # which step 20 accounts for
    assert summarize(history_of(past), past, elapsed=61.0, outcome="done")["rollouts"]["failed"] == 20


def test_the_time_of_a_resumed_job_says_of_what_it_is(past: Path) -> None:
    history = history_of(past)
    for since, expected in ((0.0, "1 min 01 s\n"), (120.0, "1 min 01 s in this session\n")):
        history.since = since
        console = Console(file=io.StringIO(), width=100)
        print_summary(summarize(history, past, elapsed=61.0, outcome="done"), {}, console)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert expected in "".join(f"{line.rstrip()}\n" for line in shown.splitlines())


def test_failures_are_on_a_steps_line(past: Path) -> None:
    history = history_of(past)
    assert "failed 1  " in describe_step(history.shipped[3], history)
    assert "failed" not in describe_step(history.shipped[3] | {"rollouts/failed": 0}, history)


def test_nothing_measured_is_said_so(tmp_path: Path) -> None:
    summary = summarize(history_of(tmp_path), tmp_path, elapsed=1.0, outcome="failed")
    assert summary["reward"]["first"] is None
    assert summary["event_loop_lag_seconds"] == {"p50": None, "p99": None, "max": None}
    console = Console(file=io.StringIO(), width=100)
    print_summary(summary, {}, console)
    assert "reward" in console.file.getvalue()  # type: ignore[attr-defined]


def test_lag_over_the_run_lies_between_what_the_steps_saw(past: Path) -> None:
    lag = lag_quantiles(history_of(past))
    assert lag["max"] == pytest.approx(0.025)
    assert lag["p50"] == pytest.approx(0.0005, rel=0.1)
    assert lag["p99"] is not None
    assert 0.002 < lag["p99"] < 0.025


def worker(state: State, status: str = "") -> WorkerView:
    return WorkerView("server", state, time.time() - 3, 42, status)


def test_plain_progress_tells_changes_and_steps_and_beats(past: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History.of(past, "test", 20)
    console = Console(file=io.StringIO(), width=300)
    progress = choose(console, {"test": history})
    assert isinstance(progress, PlainProgress)
    progress.update([worker(State.STARTING)], [])
    progress.update([worker(State.STARTING)], [])
    progress.update([worker(State.READY)], [(history, line) for line in history.refresh()])
    monkeypatch.setattr(cli.display.progress, "HEARTBEAT_SECONDS", -1.0)
    progress.update([worker(State.READY, "generating")], [])
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 2 + 20 + 1
    assert "server starting" in lines[0]
    assert "server ready after" in lines[1]
    assert "step 20/20  reward 1.000" in lines[21]
    assert "... step 20/20; server ready for 3 s (generating)" in lines[22]


def test_trouble_and_the_reason_of_an_end_are_told_once(past: Path) -> None:
    console = Console(file=io.StringIO(), width=300)
    progress = choose(console, {"test": History.of(past, "test", 20)})
    ready, stuck = worker(State.READY), replace(worker(State.READY), trouble="silent since 12:00:00")
    died = replace(ready, state=State.FAILED, last_death="ended with exit code 1", last_output="ValueError: no")
    for view in (ready, stuck, stuck, ready, died, died):
        progress.update([view], [])
    lines = [line[9:] for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines == [
        "server ready",
        "server: silent since 12:00:00",
        "server: the problem is over",
        "server ended with exit code 1: failed; last line of its output: ValueError: no",
    ]


def test_live_progress_shows_bar_curves_and_workers(past: Path) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    progress = choose(console, {"test": history_of(past)})
    assert isinstance(progress, LiveProgress)
    progress.update([worker(State.STARTING, "loading")], [])
    progress.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("server starting", "loading", "step 20/20", "reward", "█"):
        assert part in shown


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_curves_are_drawn(past: Path, tmp_path: Path, suffix: str) -> None:
    path = plot([history_of(past)], tmp_path / f"curves.{suffix}", "test")
    assert path.stat().st_size > 10_000


@pytest.fixture
def two(past: Path) -> dict[str, History]:
    """The past run, and another that has come to its third step; by their ids."""
    write_lines(past / "run_late" / "metrics.jsonl", [shipped_line(step, 200.0 + step) for step in range(1, 4)])
    return {name: History.of(past, name, steps) for name, steps in (("test", 20), ("late", 9))}


def test_plain_progress_says_which_run_took_a_step_and_what_died(two: dict[str, History]) -> None:
    console = Console(file=io.StringIO(), width=300)
    progress = choose(console, two)
    dead = WorkerView("trainer", State.RESTARTING, 0.0, None, "", restarts=1, last_death="was killed by SIGKILL")
    fresh = [(history, line) for history in two.values() for line in history.refresh()]
    progress.update([dead, WorkerView("orchestrator_late", State.STARTING, 0.0, 7, "waiting for a place")], fresh)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "trainer was killed by SIGKILL: restarting",
        "orchestrator_late: waiting for a place",
        "test  step 20/20",
        "late  step 3/9",
    ):
        assert part in shown


def test_live_progress_has_a_line_for_each_of_several_runs(two: dict[str, History]) -> None:
    for history in two.values():
        history.refresh()
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    progress = choose(console, two)
    progress.update([worker(State.READY)], [])
    progress.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("test", "20/20", "late", "3/9"):
        assert part in shown


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


@pytest.mark.slow
def test_curves_of_several_runs_are_drawn(two: dict[str, History], tmp_path: Path) -> None:
    for history in two.values():
        history.refresh()
    path = plot(list(two.values()), tmp_path / "curves.svg", "two")
    text = path.read_text()
    assert "<!-- test -->" in text
    assert "<!-- late -->" in text


def of_a_job(output: Path, **worker: Any) -> None:
    """Makes `output` a job's directory, whose trainer was as given."""
    (output / "job.json").write_text(json.dumps({"orchestrator": {"run_id": "test", "steps": 20}}))
    fields = {"name": "trainer", "state": "ready", "since": 0, "pid": 1, "status": "step 19"} | worker
    (output / "processes.json").write_text(json.dumps({"job": "running", "workers": [fields]}))


def shown_by_status(output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert status([str(output)]) == 0
    return capsys.readouterr().out


def test_status_shows_the_run_its_processes_and_the_last_error(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_a_job(past)
    (past / "trainer" / "trainer.log").write_text("fine\n12:00 ERROR   out of memory\nmore\n")
    lose(past, step=20)
    shown = shown_by_status(past, capsys)
    for part in ("20/20", "1.000", "was ready", "no", "last error of trainer: 12:00 ERROR   out of memory"):
        assert part in shown
    assert "run test: 512 rollouts discarded since step 20 (500 failed, 12 filtered): no rollout of 4 survived" in shown


def test_status_shows_brackets_as_they_are(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_a_job(past, status="at [fe80::1]:8000 [/red]", restarts=1, last_death="died [/of] it")
    shown = shown_by_status(past, capsys)
    assert "at [fe80::1]:8000 [/red]" in shown
    assert "1, it died [/of] it" in shown


def test_status_shows_what_could_steer_a_terminal_as_text(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_a_job(past, status="\x1b[2J", trouble="\x9b2J")
    place = {"function": "f[int]\x1b[2J", "file": "x.py", "line": 1, "inside": ""}
    blame = {"kind": "callback", **place, "callback": "", "thread": "", "seconds": 1.0, "worst": 1.0, "count": 1}
    write_lines(past / "run_guest" / "metrics.jsonl", [shipped_line(1, 200.0) | {METRIC: [blame]}])
    (past / "run_guest" / "orchestrator.log").write_text("ERROR \x1b]0;title\x07\n")
    (past / "run_guest" / "control").mkdir()
    (past / "run_guest" / "control" / "evicted.txt").write_text("\x1b[1A[/red] gone")
    shown = shown_by_status(past, capsys)
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    for told in (r"\x9b2J; \x1b[2J", r"ERROR \x1b]0;title\x07", r"evicted: \x1b[1A[/red] gone", r"f[int]\x1b[2J"):
        assert told in shown


def test_status_shows_errors_of_the_newest_session_only(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    former, present, farewell = b"ERROR of old\n", b"fine\nERROR of now\n", b"ERROR at the end\n"
    (past / "trainer" / "trainer.log").write_bytes(former + present + farewell)
    until = len(former) + len(present)
    of_a_job(past, state="stopped", log_from=len(former), log_until=until)
    assert "last error of trainer: ERROR of now" in shown_by_status(past, capsys)
    of_a_job(past, state="failed", log_from=len(former), log_until=until)
    assert "last error of trainer: ERROR at the end" in shown_by_status(past, capsys)
    of_a_job(past, state="stopped", log_from=until, log_until=until)
    assert "last error" not in shown_by_status(past, capsys)
    of_a_job(past, state="stopped", log_from=None)
    assert "last error" not in shown_by_status(past, capsys)


def test_status_of_roles_that_were_started_one_by_one(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by_status(past, capsys)
    assert "20/?" in shown
    (past / "run_test" / "control").mkdir()
    (past / "run_test" / "control" / "orch.toml").write_text("steps = 30\n")
    shown = shown_by_status(past, capsys)
    assert "20/30" in shown
    assert "No processes are known" in shown
    for damaged in (b"steps = ", b"steps = 'many'\n", b"\xff"):
        (past / "run_test" / "control" / "orch.toml").write_bytes(damaged)
        assert "20/?" in shown_by_status(past, capsys), "which is for its trainer to refuse"


def test_status_of_a_directory_that_holds_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds neither a job"):
        status([str(tmp_path)])


def test_status_shows_others_runs_evictions_and_restarts(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_a_job(past, restarts=2, last_death="was killed by SIGKILL")
    write_lines(past / "run_visitor" / "metrics.jsonl", [shipped_line(1, 200.0)])
    (past / "run_visitor" / "orchestrator.log").write_text("12:00 ERROR   no more disk\n")
    (past / "run_visitor" / "control").mkdir()
    (past / "run_visitor" / "control" / "evicted.txt").write_text("it diverged\n")
    shown = shown_by_status(past, capsys)
    for part in (
        "visitor",
        "evicted",
        "run visitor evicted: it diverged",
        "not running",
        "2, it was killed by SIGKILL",
    ):
        assert part in shown
    assert "last error of run visitor: 12:00 ERROR   no more disk" in shown
    descriptor = take_lock(past / "run_test" / "orchestrator.lock", "taken")
    assert "running" in shown_by_status(past, capsys).replace("not running", "")
    os.close(descriptor)


def test_durations_read_well() -> None:
    assert [duration(seconds) for seconds in (0.4, 59, 60, 245.2)] == ["0 s", "59 s", "1 min 00 s", "4 min 05 s"]


def test_failures_are_told_by_environment_and_kind(tmp_path: Path) -> None:
    (tmp_path / "run_test").mkdir()
    lines = [
        shipped_line(step, 1.0)
        | {"rollouts/failed": 94, "failures/reverse/the reward is nan": 56, "failures/reverse/KeyError": 38}
        for step in (1, 2)
    ]
    (tmp_path / "run_test" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = History.of(tmp_path, "test", 2)
    history.refresh()
    assert "failed 94: 56 the reward is nan, 38 KeyError (in reverse)  " in describe_step(history.shipped[1], history)
    summary = summarize(history, tmp_path, 1.0, "done")
    assert summary["failures"] == {"reverse": {"the reward is nan": 112, "KeyError": 76}}
    words = "112 the reward is nan, 76 KeyError (in reverse)"
    for shown in (summary, summarize_runs([history, history], {}, tmp_path, 1.0, "done")):
        console = Console(file=io.StringIO(), width=200)
        print_summary(shown, {}, console)
        assert words in console.file.getvalue()  # type: ignore[attr-defined]
    console = Console(file=io.StringIO(), width=200)
    for part in status_parts(read_status(tmp_path)):
        console.print(part)
    assert words in console.file.getvalue()  # type: ignore[attr-defined]
    assert read_status(tmp_path).as_json()["runs"][0]["failures"] == summary["failures"]
