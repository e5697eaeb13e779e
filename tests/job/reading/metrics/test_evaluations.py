"""The results of evaluations as console, summary and status show them."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from counterpoint.cli.display.progress import PlainProgress, describe_step
from counterpoint.cli.display.status_tables import status_parts
from counterpoint.cli.display.summary_tables import print_summary
from counterpoint.job.reading.metrics import evaluations
from counterpoint.job.reading.metrics.evaluations import EvaluationResults, in_words
from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.status import read_status
from counterpoint.job.reading.summary import summarize
from counterpoint.transport.files.atomic import publish_directory
from tests.support.jobs import write_lines
from tests.support.past_jobs import history_of, make_job


def result(step: int, passed: float, name: str = "held-out", time: float = 0.0, **more: Any) -> dict[str, Any]:
    """A line of `evaluations.jsonl`, with what no display needs left out."""
    interval = {"value": passed, "low": round(passed - 0.01, 4), "high": round(passed + 0.02, 4)}
    metrics = {"reward/mean": {"value": 0.5, "low": None, "high": None}, "pass@1": interval, "sums/pass@1": interval}
    return {"evaluation": name, "step": step, "time": time, "metrics": metrics} | more


def write_results(past: Path, *lines: dict[str, Any]) -> None:
    write_lines(past / "run_test" / "evaluations.jsonl", list(lines))


def keep_best(past: Path, step: int) -> Path:
    best = past / "run_test" / "best" / f"step_{step}"
    with publish_directory(best) as partial:
        (partial / "best.json").write_text(json.dumps({"step": step, "score": 1.0, "evaluation": "held-out"}))
    return best


def printed(*renderables: Any) -> str:
    console = Console(file=io.StringIO(), width=300)
    for renderable in renderables:
        console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_summary_says_how_an_evaluation_changed_and_where_the_best_weights_are(past: Path) -> None:
    write_results(past, result(0, 0.025), result(10, 0.03), result(20, 0.069), result(0, 0.2, "other"))
    best = keep_best(past, 10)
    summary = summarize(history_of(past), past, elapsed=1.0, outcome="done")
    assert summary["evaluations"]["held-out"]["best"] == {"step": 10, "path": str(best)}
    assert summary["evaluations"]["other"]["best"] is None
    console = Console(file=io.StringIO(), width=300)
    print_summary(json.loads(json.dumps(summary)), {}, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    held_out = f"reward 0.500 → 0.500, pass@1 0.025 → 0.069 [0.059, 0.089] (steps 0 and 20); best step 10, {best}"
    assert held_out in text
    assert "reward 0.500, pass@1 0.200 [0.190, 0.220] (step 0)" in text
    assert "sums/pass@1" not in text, "one environment's own numbers are the same again"


def test_status_has_the_newest_result(past: Path) -> None:
    write_results(past, result(0, 0.025), result(20, 0.069))
    make_job(past)
    status = read_status(past)
    assert "pass@1 0.069" in printed(*status_parts(status))
    (run,) = status.as_json()["runs"]
    assert run["evaluations"]["held-out"]["newest"]["metrics"]["pass@1"] == {
        "value": 0.069,
        "low": 0.059,
        "high": 0.089,
    }


def test_a_result_is_a_line_of_the_progress_once_and_only_in_the_jobs_own_invocation(past: Path) -> None:
    write_results(past, result(0, 0.025, time=100.0))
    history = History.of(past, "test", 20, since=200.0)
    console = Console(file=io.StringIO(), width=300)
    progress = PlainProgress(console, {"test": history})
    for lines in ([], [result(10, 0.05, time=300.0)], []):
        with (past / "run_test" / "evaluations.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        history.refresh()
        progress.update([], [])
    said = [line for line in console.file.getvalue().splitlines() if "held-out" in line]  # type: ignore[attr-defined]
    assert len(said) == 1
    assert said[0].endswith("evaluation held-out of step 10: reward 0.500, pass@1 0.050 [0.040, 0.070]")


def test_a_result_of_failed_rollouts_says_so(past: Path) -> None:
    few: dict[str, Any] = {
        "rollouts/completed": 49,
        "rollouts/failed": 1,
        "failures": {"TimeoutError: late (in score, my.py:3)": 1},
    }
    all_: dict[str, Any] = {
        "rollouts/completed": 0,
        "rollouts/failed": 50,
        "failures": {"KeyError: 'x' (in score, my.py:3)": 50},
    }
    write_results(past, result(0, 0.5, **few), result(20, 0.0, **all_))
    history = history_of(past)
    first, newest = (str(each["held-out"]) for each in (history.evaluations.first, history.evaluations.newest))
    assert "failed" not in first
    assert newest.endswith("; 50 of 50 rollouts failed: KeyError: 'x' (in score, my.py:3)")
    summary = summarize(history, past, elapsed=1.0, outcome="done")
    console = Console(file=io.StringIO(), width=300)
    print_summary(json.loads(json.dumps(summary)), {}, console)
    assert "50 of 50 rollouts failed" in console.file.getvalue()  # type: ignore[attr-defined]


def test_what_is_no_result_is_passed_over(past: Path) -> None:
    path = past / "run_test" / "evaluations.jsonl"
    lines = [
        "[]", "{", "null", json.dumps({"evaluation": 1, "step": 1, "time": 1, "metrics": {}}),
        json.dumps(result(1, 0.5) | {"step": True}), json.dumps(result(1, 0.5) | {"metrics": [1]}),
        json.dumps(result(2, 0.5) | {"metrics": {"pass@1": {"value": "0.5"}, "pass@2": 3, "reward/mean": None}}),
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    results = EvaluationResults(path.parent)
    [only] = results.refresh()
    assert (only.step, only.metrics) == (2, {})
    assert results.headline == ""
    assert str(only) == "evaluation held-out of step 2: no result"


def test_a_result_of_which_every_rollout_failed_has_no_value(past: Path) -> None:
    """Also one that an older version wrote as 0."""
    counts = {"rollouts/completed": 0, "rollouts/failed": 50, "failures": {"KeyError: gone": 50}}
    write_results(past, result(2, 0.0) | counts)
    results = EvaluationResults(past / "run_test")
    [only] = results.refresh()
    assert (only.metrics, results.headline) == ({}, "")
    assert "failed; 50 of 50 rollouts failed: KeyError: gone" in str(only)
    assert in_words(results.as_json())["held-out"].startswith("failed (step 2)")


def test_an_evaluation_that_could_not_be_played_says_why(past: Path) -> None:
    write_results(past, {"evaluation": "held-out", "step": 3, "time": 1.0, "error": "no rows"})
    [only] = EvaluationResults(past / "run_test").refresh()
    assert str(only) == "evaluation held-out of step 3: no rows"


def test_evaluations_of_a_hostile_guest_are_bounded(past: Path) -> None:
    write_results(past, *(result(1, 0.5, f"e{number}") for number in range(200)))
    results = EvaluationResults(past / "run_test")
    results.refresh()
    assert len(results.newest) == 64


def test_a_best_version_that_cannot_be_read_is_none(past: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_results(past, result(1, 0.5))
    best = past / "run_test" / "best" / "step_1"
    best.mkdir(parents=True)
    for name in ("STABLE", "best.json"):
        (best / name).touch()

    def refused(path: Path, most: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(evaluations, "read_json", refused)  # root may read every file, so that no mode would do
    results = EvaluationResults(past / "run_test")
    results.refresh()
    assert results.as_json()["held-out"]["best"] is None


def test_lag_is_on_a_steps_line_only_where_it_is_late(past: Path) -> None:
    history = history_of(past)
    line = history.shipped[3]
    assert "lag" not in describe_step(line, history)
    assert "lag max 250.0 ms" in describe_step(line | {"event_loop_lag/max": 0.25}, history)
