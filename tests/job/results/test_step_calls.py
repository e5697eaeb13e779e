"""`on_step`: each trained step is told once, with what both sides say of it."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest

from counterpoint.job.results.step_calls import StepCalls
from tests.support.jobs import shipped_line, write_lines
from tests.support.polling import DEADLINE_SECONDS, wait_until


def add(directory: Path, step: int, *, trained: bool) -> None:
    line = {"run_id": "a", "step": step, "time": 200.0 + step, "loss": step / 10}
    if trained:
        (directory / "trainer").mkdir(exist_ok=True)
        write_lines(directory / "trainer" / "metrics.jsonl", [line])
    else:
        write_lines(directory / "run_a" / "metrics.jsonl", [shipped_line(step, 100.0 + step)])


@pytest.mark.parametrize("resume", [False, True])
def test_each_trained_step_is_told_once(tmp_path: Path, resume: bool) -> None:
    add(tmp_path, 1, trained=False)
    add(tmp_path, 1, trained=True)
    add(tmp_path, 2, trained=False)  # it is trained after the resume
    told: list[dict[str, Any]] = []
    ended = Event()
    calls = StepCalls(tmp_path, told.append, resume)
    calls.begin(lambda: True, ended.is_set)
    add(tmp_path, 2, trained=True)
    wait_until(lambda: bool(told) and told[-1]["step"] == 2, "the second step", DEADLINE_SECONDS)
    add(tmp_path, 3, trained=False)
    add(tmp_path, 3, trained=True)
    ended.set()
    assert calls.wait(DEADLINE_SECONDS)
    assert [row["step"] for row in told] == ([2, 3] if resume else [1, 2, 3])
    assert (told[-1]["run_id"], told[-1]["loss"], told[-1]["time"], told[-1]["trainer/time"]) == (
        "a",
        0.3,
        103.0,
        203.0,
    )


def test_what_a_call_raises_comes_from_the_wait(tmp_path: Path) -> None:
    add(tmp_path, 1, trained=False)
    add(tmp_path, 1, trained=True)

    def fail(row: dict[str, Any]) -> None:
        raise ValueError(f"step {row['step']}")

    calls = StepCalls(tmp_path, fail, resume=False)
    calls.begin(lambda: True, lambda: True)
    with pytest.raises(ValueError, match="step 1"):
        calls.wait(DEADLINE_SECONDS)
