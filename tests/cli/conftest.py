"""A job's file and a job's past for the tests of the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JOB = """
output_dir = "{output_dir}"
model = "tiny-moe"

[inference]
max_model_len = 256

[trainer]
max_tokens = 1024

[orchestrator]
run_id = "test"
steps = 20

[[orchestrator.environments]]
name = "reverse"
kind = "reverse-text"

[orchestrator.sampling]
max_tokens = 32
"""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("COUNTERPOINT_"):
            monkeypatch.delenv(name)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A valid job whose output goes to `tmp_path / "out"`."""
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(output_dir=tmp_path / "out"))
    return path


def shipped_line(step: int, time: float, **more: Any) -> dict[str, Any]:
    """A step's metrics as an orchestrator writes them; reward rises by 0.05 a step."""
    return {
        "step": step,
        "time": time,
        "reward/mean": 0.05 * step,
        "rollouts/completed": 64,
        "rollouts/failed": 1,
        "rollouts/cancelled": 0,
        "rollouts/filtered": 3,
        "staleness/mean": 1.5,
        "staleness/max": 2,
        "tokens/prompt": 500,
        "tokens/completion": 1000,
        "event_loop_lag/min": 0.0001,
        "event_loop_lag/mean": 0.001,
        "event_loop_lag/median": 0.0005,
        "event_loop_lag/p90": 0.002,
        "event_loop_lag/p99": 0.004,
        "event_loop_lag/max": 0.005 + 0.001 * step,
        "event_loop_lag/n": 20,
    } | more


def trained_line(step: int, run_id: str = "test") -> dict[str, Any]:
    """A step's metrics as a trainer writes them."""
    return {"run_id": run_id, "step": step, "time": 100.0 + step, "loss": 0.1, "mismatch_kl": step * 1e-6}


@pytest.fixture
def write_lines() -> Callable[[Path, list[dict[str, Any]]], None]:
    """Appends JSON lines to a file whose directory is made if need be."""

    def write(path: Path, lines: list[dict[str, Any]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    return write


@pytest.fixture
def past(tmp_path: Path, write_lines: Callable[[Path, list[dict[str, Any]]], None]) -> Path:
    """A job's directory in which 20 steps were shipped, two seconds apart, and 19 trained."""
    output = tmp_path / "out"
    write_lines(output / "run_test" / "metrics.jsonl", [shipped_line(step, 100.0 + 2 * step) for step in range(1, 21)])
    write_lines(output / "trainer" / "metrics.jsonl", [trained_line(step) for step in range(1, 20)])
    write_lines(output / "trainer" / "metrics.jsonl", [trained_line(5, "another") | {"mismatch_kl": 9.0}])
    return output
