"""Chaos in small: two rounds in a real job, whose audit finds nothing. (That it finds what is there: `test_chaos_audit.py`.)"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SEED = 12
"""The signal that kills trainer and orchestrators; vLLM takes a minute to return, and is killed in `tests/whole_job`."""


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1500)
def test_a_job_whose_processes_are_killed_trains_every_step_once(tmp_path: Path, tiny_dense: Path) -> None:
    command = [sys.executable, "-m", "perf.chaos", "job", "--rounds", "2", "--seed", str(SEED), "--json"]
    completed = subprocess.run(
        [*command, "--keep", str(tmp_path / "kept")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    (case,) = json.loads(completed.stdout)
    figures = {figure["name"]: figure["value"] for figure in case["figures"]}
    assert figures["trainer: killed"] >= 1, completed.stderr
    assert figures["orchestrator: killed"] >= 1, completed.stderr
    assert figures["runs"] == 3
    assert figures["steps trained"] == figures["steps committed"] >= 12
