"""One error of a kind, found in records that are not trusted and may be large."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.rollouts.failure_example import MAX_LINE_BYTES, FailureExamples
from counterpoint.transport.files.atomic import publish_directory
from tests.support.jobs import shipped_line

FAILURES = {"toy": {"KeyError": 3}}


@pytest.fixture(autouse=True)
def _plenty_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.job.reading.rollouts.failure_example.READ_SECONDS", 3600.0)


def run_with(job: Path, run_id: str, *records: dict[str, Any]) -> History:
    """A run whose first step counts a KeyError, and has these records."""
    with publish_directory(job / f"run_{run_id}" / "rollouts" / "step_1", durable=False) as step:
        (step / "rollouts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    history = History.of(job, run_id, 1)
    history.shipped = {1: shipped_line(1, 1.0) | {"failures/toy/KeyError": 3}}
    return history


def error(text: str) -> dict[str, Any]:
    return {"environment": "toy", "error": text}


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path) -> None:
    long = {"environment": "toy", "error": "KeyError: 'long'", "turns": ["x" * 2**22]}
    history = run_with(tmp_path, "a", long, error("KeyError: 'short'"))
    assert FailureExamples(tmp_path).example(history, FAILURES) == "KeyError: 'short'"


def test_a_long_error_takes_little_memory(tmp_path: Path) -> None:
    history = run_with(tmp_path, "a", error("a_" * (MAX_LINE_BYTES // 2 - 50)), error(f"KeyError: {'a_' * 10**5}"))
    tracemalloc.start()
    example = FailureExamples(tmp_path).example(history, FAILURES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert example is not None
    assert example.startswith("KeyError: a_a_")
    assert len(example) <= 300
    assert peak < 16 * MAX_LINE_BYTES


def test_all_runs_together_are_read_up_to_a_limit(tmp_path: Path) -> None:
    others = [{"environment": "toy", "reward": 1.0, "padding": "x" * 1000}] * 20
    first = run_with(tmp_path, "a", *others, error("KeyError: 'a'"))
    second = run_with(tmp_path, "b", error("KeyError: 'b'"))
    assert FailureExamples(tmp_path).example(first, FAILURES) == "KeyError: 'a'"
    limited = FailureExamples(tmp_path, read_bytes=5000)
    assert limited.example(first, FAILURES) is None
    assert limited.example(second, FAILURES) is None


def test_damaged_and_missing_records_give_no_example(tmp_path: Path) -> None:
    history = run_with(tmp_path, "a", error("KeyError: 'a'"))
    path = tmp_path / "run_a" / "rollouts" / "step_1" / "rollouts.jsonl"
    path.write_text("not JSON\n")
    assert FailureExamples(tmp_path).example(history, FAILURES) is None
    path.unlink()
    assert FailureExamples(tmp_path).example(history, FAILURES) is None
