"""A job's file, and the metrics of its steps as its roles write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


EARLY_WARNING = {
    "sign": "cut",
    "about": "math",
    "figure": 0.95,
    "reason": "95% of the answers are cut at their limit",
    "advice": "raise sampling.max_tokens",
    "since": 12,
    "time": 20.0,
}
"""One of the list `early_warnings` of a step's line."""


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


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Appends JSON lines to a file, and makes its directory if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
