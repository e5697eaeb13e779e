"""The progress and the curves of a job, on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from rich.console import Console

import counterpoint.cli.display.progress
import counterpoint.job.reading.rollouts.rollout_records
from counterpoint.cli.display.plot import plot
from counterpoint.cli.display.progress import LiveProgress, PlainProgress, choose, describe_step
from counterpoint.cli.run import _draw_curves, _prepare_curves
from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.job.reading.metrics.evaluations import Evaluated
from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.rollouts.rollout_records import dropped_records
from counterpoint.orchestrator.rollouts.branching import FACTOR, SAMPLES
from counterpoint.orchestrator.scheduling.lossless import ALLOWED, BOUND, LEAD, LOST, LOST_MEAN
from counterpoint.orchestrator.step.differences import EXAMPLES, Notice
from counterpoint.transport.errors import UserError
from tests.support.jobs import EARLY_WARNING, shipped_line, write_lines
from tests.support.past_jobs import history_of


def test_failures_are_on_a_steps_line(past: Path) -> None:
    history = history_of(past)
    assert "failed 1  " in describe_step(history.shipped[3], history)
    assert "failed" not in describe_step(history.shipped[3] | {"rollouts/failed": 0}, history)


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
    monkeypatch.setattr(counterpoint.cli.display.progress, "HEARTBEAT_SECONDS", -1.0)
    progress.update([worker(State.READY, "generating")], [])
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 2 + 1 + 20 + 1
    assert "server starting" in lines[0]
    assert "server ready after" in lines[1]
    assert "staleness is" in lines[2]
    assert "step 20/20  reward 1.000" in lines[22]
    assert "... step 20/20; server ready for 3 s (generating)" in lines[23]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_is_lost_as_too_old_is_said(past: Path, is_terminal: bool) -> None:
    history = history_of(past)
    history.shipped[20] |= {BOUND: 6, LEAD: 0, LOST: 0.25, LOST_MEAN: 5.5}
    console = Console(file=io.StringIO(), width=300, force_terminal=is_terminal)
    progress = choose(console, {"test": history})
    for _ in range(2):
        progress.update([worker(State.READY)], [])
    progress.close()
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "max_off_policy_steps = 6" in said
    assert is_terminal or said.count("25.0%") == 1


@pytest.mark.parametrize("is_terminal", [False, True])
def test_requests_that_do_not_extend_each_other_are_said(past: Path, is_terminal: bool) -> None:
    history = history_of(past)
    history.shipped[20] |= {SAMPLES: 20.0, FACTOR: 5.2}
    console = Console(file=io.StringIO(), width=400, force_terminal=is_terminal)
    progress = choose(console, {"test": history})
    for _ in range(2):
        progress.update([worker(State.READY)], [])
    progress.close()
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "20.0 samples" in said
    assert is_terminal or said.count("5.2 times") == 1


def test_the_step_in_which_slow_rollouts_raise_the_bound_says_so(past: Path) -> None:
    history = history_of(past)
    for step, allowed in ((18, 4), (19, 6), (20, 6)):
        history.shipped[step] |= {ALLOWED: allowed}
    said = [describe_step(history.shipped[step], history) for step in (17, 18, 19, 20)]
    assert ["max_off_policy_steps 6" in words for words in said] == [False, False, True, False]


def test_a_heartbeat_says_a_long_reason_once(past: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counterpoint.cli.display.progress, "HEARTBEAT_SECONDS", -1.0)
    console = Console(file=io.StringIO(), width=300)
    progress = choose(console, {"test": History.of(past, "test", 20)})
    for number in (8, 16, 24):
        progress.update([worker(State.READY, f"{number} rollouts failed: {'word ' * 30}the reason {number}")], [])
    progress.update([worker(State.READY, "another: the reason")], [])
    beats = [line for line in console.file.getvalue().splitlines() if " ... " in line]  # type: ignore[attr-defined]
    assert ["the reason" in line for line in beats] == [True, False, False, True]
    assert ["16 rollouts failed: word" in line for line in beats] == [False, True, False, False]


def test_a_worker_that_is_ready_says_where_it_is(past: Path) -> None:
    console = Console(file=io.StringIO(), width=300)
    progress = choose(console, {"test": History.of(past, "test", 20)})
    progress.update([worker(State.STARTING)], [])
    progress.update([worker(State.READY, "http://127.0.0.1:8400/")], [])
    last = console.file.getvalue().splitlines()[-1]  # type: ignore[attr-defined]
    assert "server ready after" in last
    assert last.endswith(": http://127.0.0.1:8400/")


def test_what_a_worker_said_while_it_was_starting_is_not_said_again(past: Path) -> None:
    console = Console(file=io.StringIO(), width=300)
    progress = choose(console, {"test": History.of(past, "test", 20)})
    progress.update([worker(State.STARTING, "http://127.0.0.1:8400/")], [])
    progress.update([worker(State.READY, "http://127.0.0.1:8400/")], [])
    assert console.file.getvalue().count("8400") == 1  # type: ignore[attr-defined]


def test_a_step_s_line_names_the_step_that_its_loss_is_of(past: Path) -> None:
    history = history_of(past)
    trained = history.last_trained["step"]
    assert f"trained {trained}  loss" in describe_step(history.shipped[3], history)
    assert "trained" not in describe_step(history.shipped[trained], history)


def test_a_result_is_told_once_however_often_the_workers_change(past: Path) -> None:
    console = Console(file=io.StringIO(), width=300)
    history = History.of(past, "test", 20)
    progress = choose(console, {"test": history})
    for results in ([Evaluated("held-out", 0, 1.0, {}, "none")], [Evaluated("held-out", 5, 2.0, {}, "none")]):
        history.new_results = results
        for state in (State.STARTING, State.READY):
            progress.update([worker(state)], [])
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert [shown.count(f"evaluation held-out of step {step}") for step in (0, 5)] == [1, 1]


def test_a_status_of_a_worker_that_starts_is_told_once_it_has_lasted(
    past: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), width=300)
    progress = choose(console, {"test": History.of(past, "test", 20)})
    for status in ("waiting for a", "waiting for a and b", "waiting for a"):
        progress.update([worker(State.STARTING, status)], [])
    assert "waiting" not in console.file.getvalue()  # type: ignore[attr-defined]
    monkeypatch.setattr(counterpoint.cli.display.progress, "LASTING_SECONDS", 0.0)
    for _ in range(2):
        progress.update([worker(State.STARTING, "waiting for a")], [])
    assert console.file.getvalue().count("server: waiting for a\n") == 1  # type: ignore[attr-defined]


def test_trouble_and_the_reason_of_an_end_are_told_once(past: Path) -> None:
    console = Console(file=io.StringIO(), width=300)
    progress = choose(console, {"test": History.of(past, "test", 20)})
    ready, stuck = worker(State.READY), replace(worker(State.READY), trouble="silent since 12:00:00")
    died = replace(ready, state=State.FAILED, last_death="ended with exit code 1", last_output="ValueError: no")
    explained = replace(died, state=State.RESTARTING, last_death="ended with exit code 1: no memory", last_output="")
    late = replace(worker(State.STOPPING, "loading /m"), last_death="was not ready within 600 s")
    blocked = replace(ready, trouble="its event loop has been blocked at score (my.py:3)")
    killed = replace(died, last_death="was silent for 60 s and was killed", last_output="while True:")
    ended = replace(ready, state=State.STOPPING)
    for view in (ready, stuck, stuck, ready, died, died, explained, late, blocked, killed, blocked, ended):
        progress.update([view], [])
    lines = [line[9:] for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines == [
        "server ready",
        "server: silent since 12:00:00",
        "server: the problem is over",
        "server ended with exit code 1: failed; last line of its output: ValueError: no",
        "server restarting: it ended with exit code 1: no memory",
        "server stopping: it was not ready within 600 s (loading /m)",
        "server ready",
        f"server: {blocked.trouble}",
        f"server {killed.last_death}: failed; {blocked.trouble}; last line of its output: while True:",
        "server ready",
        f"server: {blocked.trouble}",
        "server stopping",
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


def test_without_matplotlib_a_job_ends_without_a_picture_and_says_what_to_install(
    past: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _prepare_curves()
    job, config = SimpleNamespace(histories={"test": history_of(past)}), SimpleNamespace(output_dir=past)
    console = Console(file=io.StringIO(), width=500)
    assert _draw_curves(cast(Any, job), cast(Any, config), console) is None
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said == "curves.png needs matplotlib, which is not installed: pip install 'counterpoint[plot]'\n"
    assert not (past / "curves.png").exists()


@pytest.fixture
def two(past: Path) -> dict[str, History]:
    """The past run, and another that has come to its third step; by their ids."""
    write_lines(past / "run_late" / "metrics.jsonl", [shipped_line(step, 200.0 + step) for step in range(1, 4)])
    return {name: History.of(past, name, steps) for name, steps in (("test", 20), ("late", 9))}


def test_plain_progress_says_which_run_took_a_step_and_what_died(
    two: dict[str, History], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counterpoint.cli.display.progress, "LASTING_SECONDS", 0.0)
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


@pytest.mark.slow
def test_curves_of_several_runs_are_drawn(two: dict[str, History], tmp_path: Path) -> None:
    for history in two.values():
        history.refresh()
    path = plot(list(two.values()), tmp_path / "curves.svg", "two")
    text = path.read_text()
    assert "<!-- test -->" in text
    assert "<!-- late -->" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_groups_without_a_difference_are_told_once_and_with_what_to_do(past: Path, terminal: bool) -> None:
    history = History.of(past, "test", 20)
    console = Console(file=io.StringIO(), width=300, force_terminal=terminal)
    progress = choose(console, {"test": history})
    for groups, step in ((64, 20), (64, 20), (128, 20), (None, 21), (64, 22), (128, 69), (64, 70)):
        history.shipped = {step: shipped_line(step, float(step))}
        reason = "in 60 of them each rollout has the reward 0"
        history.no_difference = None if groups is None else Notice(groups, reason, "take easier examples", 0.0)
        progress.update([worker(State.READY)], [])
    progress.close()
    said = console.file.getvalue()  # type: ignore[attr-defined]
    if not terminal:
        assert [said.count(f"the last {groups} groups") for groups in (64, 128)] == [2, 1]
        assert said.count("take easier examples") == 2, "with what to do at first, and again after many steps"
    assert (
        "each rollout has the reward 0. What to do: take easier examples. Three of the worst: counterpoint show" in said
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_early_warnings_are_told(past: Path, terminal: bool) -> None:
    """Each once in lines, and as long as it holds in the panel."""
    history = History.of(past, "test", 20)
    console = Console(file=io.StringIO(), width=300, force_terminal=terminal)
    progress = choose(console, {"test": history})
    for step, warnings in (
        (12, [EARLY_WARNING]),
        (13, [EARLY_WARNING]),
        (14, [EARLY_WARNING | {"about": "code\x1b[2J"}]),
    ):
        history.shipped = {step: shipped_line(step, float(step), early_warnings=warnings)}
        progress.update([worker(State.READY)], [])
    progress.close()
    said = console.file.getvalue()  # type: ignore[attr-defined]
    for about in ("math", "code"):
        told = said.count(f"cut since step 12: {about}")
        assert told >= 1 if terminal else told == 1
    assert "What to do: raise sampling.max_tokens" in said
    assert "\x1b[2J" not in said


@pytest.mark.parametrize("terminal", [False, True])
def test_one_rollout_in_full_is_printed_with_the_reason_why_nothing_is_learned(past: Path, terminal: bool) -> None:
    history = History.of(past, "test", 20)
    console = Console(file=io.StringIO(), width=300, force_terminal=terminal)
    progress = choose(console, {"test": history})
    record = {
        "rollout_id": "4-1",
        "reward": 0,
        "answer": "forty-two",
        "turns": [{"prompt": "<|user|>6 x 7<|end|>", "completion": "x" * 5000}],
    }
    report = {
        "step": 20,
        "discarded": 32,
        "notable": True,
        "reason": "group 4: \x1b[2Jno rollout survived",
        "failure": "KeyError: 'x'",
    }
    (past / "run_test" / "discarded.jsonl").write_bytes(orjson.dumps(record | {"error": "KeyError: 'x'"}))
    (past / "run_test" / "no_difference.jsonl").unlink(missing_ok=True)
    for number in (32, 64, 128):
        history.discarded = report | {"discarded": number}
        progress.update([worker(State.READY)], [])
    (past / "run_test" / "no_difference.jsonl").write_bytes(orjson.dumps(record | {"rollout_id": "9-9"}))
    history.no_difference = Notice(64, "each rollout has the reward 0", "take easier examples", 0.0)
    for _ in range(2):
        progress.update([worker(State.READY)], [])
    progress.close()
    for name in ("discarded.jsonl", "no_difference.jsonl"):
        (past / "run_test" / name).unlink()
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("run test: 32 rollouts discarded since step 20: group 4: \\x1b[2Jno rollout survived") == 1
    assert "failed: KeyError: 'x'" in said
    assert [said.count(f"rollout {each} of run test, of a dropped group") for each in ("4-1", "9-9")] == [1, 1]
    for part in ("right answer", "forty-two", "6 x 7"):
        assert said.count(part) == 2, part
    assert "<|user|>" not in said
    assert "x" * 1000 not in said


def test_a_guests_record_of_any_size_is_printed_in_few_lines_and_no_damage_ends_the_job(past: Path) -> None:
    history = History.of(past, "test", 20)
    console = Console(file=io.StringIO(), width=300)
    progress = choose(console, {"test": history})
    file = past / "run_test" / "discarded.jsonl"
    turn = {"prompt": "<|user|>hello<|end|>" * 100, "completion": "y" * 2000, "finish_reason": "z" * 5000}
    record = {"turns": [turn] * 1000, "opponent_turns": [{"completion": "w"}] * 1000, "environment": "e" * 10**6}
    for number, content in enumerate([b"no record", orjson.dumps(record), None]):
        if content is None:
            file.mkdir()
        else:
            file.write_bytes(content)
        report = {"step": 20, "discarded": 32, "notable": True, "reason": "abc"[number], "failure": ""}
        history.discarded = report
        progress.update([worker(State.READY)], [])
        file.rmdir() if content is None else file.unlink()
    progress.close()
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("turn 1 of 1000, user") == 20
    assert "and 980 turns more" in said
    assert len(said) < 1_000_000


def test_a_record_that_may_not_be_read_is_an_error_for_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run_one").mkdir()
    (tmp_path / "run_one" / "discarded.jsonl").write_bytes(b"{}\n" * 1000)
    assert len(dropped_records(tmp_path, "one")) == EXAMPLES

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(counterpoint.job.reading.rollouts.rollout_records, "open_regular", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        dropped_records(tmp_path, "one")


def test_a_step_of_which_filters_left_little_says_so(past: Path) -> None:
    history = history_of(past)
    line = dict(history.last_shipped) | {
        "rollouts/completed": 300,
        "rollouts/filtered": 237,
        "filters/zero_advantage/sums": 237,
    }
    assert "filtered 79% of 300 rollouts by zero_advantage" in describe_step(line, history)
    assert "filtered" not in describe_step(line | {"rollouts/filtered": 140}, history)
