"""Reading a job's past, and what is made of it: summary, progress, curves, status."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import cli.progress
from cli.history import History
from cli.plot import plot
from cli.progress import LiveProgress, PlainProgress, choose
from cli.status import main as status
from cli.summary import duration, lag_quantiles, print_summary, summarise
from cluster.job import WorkerView
from cluster.lifecycle import State
from orchestrator.blame_evidence import Kind
from orchestrator.offences import METRIC, Offence
from orchestrator.stacks import Place
from tests.cli.conftest import shipped_line, trained_line

Write = Callable[[Path, list[dict[str, Any]]], None]


def history_of(output: Path) -> History:
    history = History.of(output, "test")
    history.refresh()
    return history


def test_history_follows_files_that_grow_and_are_replaced(tmp_path: Path, write_lines: Write) -> None:
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


def test_steps_that_a_resume_takes_back_are_forgotten(tmp_path: Path, write_lines: Write) -> None:
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
    summary = summarise(history_of(past), past, elapsed=61.0, outcome="done")
    assert summary["steps"] == {"shipped": 20, "trained": 19}
    assert summary["reward"] == {"first": pytest.approx(0.15), "last": pytest.approx(0.9), "edge_steps": 5}
    assert summary["rollouts"] == {"completed": 1280, "failed": 20, "cancelled": 0, "filtered": 60}
    assert summary["tokens_per_second"] == pytest.approx(500)  # 1000 a step of two seconds
    assert summary["mismatch_kl"] == {"max": pytest.approx(19e-6), "mean": pytest.approx(10e-6)}
    json.dumps(summary)


def test_a_resumed_jobs_rate_leaves_out_the_pause(tmp_path: Path, write_lines: Write) -> None:
    lines = [shipped_line(1, 100.0), shipped_line(2, 102.0), shipped_line(3, 9000.0), shipped_line(4, 9001.0)]
    write_lines(tmp_path / "run_test" / "metrics.jsonl", lines)
    history = History.of(tmp_path, "test", since=8000.0)
    history.refresh()
    assert history.tokens_per_second() == pytest.approx(1000)


def test_nothing_measured_is_said_so(tmp_path: Path) -> None:
    summary = summarise(history_of(tmp_path), tmp_path, elapsed=1.0, outcome="failed")
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
    history = History.of(past, "test")
    console = Console(file=io.StringIO(), width=300)
    progress = choose(console, history, 20)
    assert isinstance(progress, PlainProgress)
    progress.update([worker(State.STARTING)], [])
    progress.update([worker(State.STARTING)], [])
    progress.update([worker(State.READY)], history.refresh())
    monkeypatch.setattr(cli.progress, "HEARTBEAT_SECONDS", -1.0)
    progress.update([worker(State.READY, "generating")], [])
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 2 + 20 + 1
    assert "server starting" in lines[0]
    assert "server ready after" in lines[1]
    assert "step 20/20  reward 1.000" in lines[21]
    assert "... step 20/20; server ready for 3 s (generating)" in lines[22]


def test_live_progress_shows_bar_curves_and_workers(past: Path) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    progress = choose(console, history_of(past), 20)
    assert isinstance(progress, LiveProgress)
    progress.update([worker(State.STARTING, "loading")], [])
    progress.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("server starting", "loading", "step 20/20", "reward", "█"):
        assert part in shown


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_curves_are_drawn(past: Path, tmp_path: Path, suffix: str) -> None:
    path = plot(history_of(past), tmp_path / f"curves.{suffix}", "test")
    assert path.stat().st_size > 10_000


def test_status_shows_the_run_its_processes_and_the_last_error(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (past / "job.json").write_text(json.dumps({"orchestrator": {"run_id": "test", "steps": 20}}))
    workers = [{"name": "trainer", "state": "ready", "since": 0, "pid": 1, "status": "step 19"}]
    (past / "processes.json").write_text(json.dumps({"job": "running", "workers": workers}))
    (past / "trainer" / "trainer.log").write_text("fine\n12:00 ERROR   out of memory\nmore\n")
    assert status([str(past)]) == 0
    shown = capsys.readouterr().out
    for part in ("20/20", "1.000", "was ready", "no", "last error of trainer: 12:00 ERROR   out of memory"):
        assert part in shown


def test_status_names_what_made_the_loop_late(
    past: Path, write_lines: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    (past / "job.json").write_text(json.dumps({"orchestrator": {"run_id": "test", "steps": 22}}))
    assert status([str(past)]) == 0
    assert "late" not in capsys.readouterr().out
    place = Place("score [hard]", "tasks/judge.py", 41)
    lines = [
        shipped_line(step, 100.0 + 2 * step, **{METRIC: [Offence(Kind.CALLBACK, place, "", "", 0.5, 0.4, 2).as_json()]})
        for step in (21, 22)
    ]
    write_lines(past / "run_test" / "metrics.jsonl", lines)
    assert status([str(past)]) == 0
    shown = capsys.readouterr().out
    for part in ("1,000.0 ms", "400.0 ms", " 4 ", "the loop ran score [hard] (tasks/judge.py:41)"):
        assert part in shown


def test_durations_read_well() -> None:
    assert [duration(seconds) for seconds in (0.4, 59, 60, 245.2)] == ["0 s", "59 s", "1 min 00 s", "4 min 05 s"]
