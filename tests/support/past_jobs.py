"""The past of a job: its histories, and files that its roles have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from counterpoint.job.reading.metrics.history import History


def history_of(output: Path) -> History:
    """Returns the history of the run `test`, with 20 steps, as read now."""
    history = History.of(output, "test", 20)
    history.refresh()
    return history


def write_discarded(output: Path, step: int, notable: bool = True) -> None:
    """Writes the run's report on 512 rollouts discarded since `step`."""
    report = {"step": step, "time": 1.0, "discarded": 512, "reason": "no rollout\nof 4 survived", "notable": notable}
    report |= {"rollouts/completed": 12, "rollouts/failed": 500, "rollouts/filtered": 12}
    (output / "run_test").mkdir(parents=True, exist_ok=True)
    (output / "run_test" / "discarded.json").write_text(json.dumps(report))


def make_job(output: Path, **worker: Any) -> None:
    """Makes `output` a job's directory, whose trainer was as given."""
    (output / "job.json").write_text(json.dumps({"orchestrator": {"run_id": "test", "steps": 20}}))
    fields = {"name": "trainer", "state": "ready", "since": 0, "pid": 1, "status": "step 19"} | worker
    (output / "processes.json").write_text(json.dumps({"job": "running", "workers": [fields]}))
