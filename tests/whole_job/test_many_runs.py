"""A job of several runs, all of it real: two that share a trainer and a vLLM from the start, and a third that joins them, comes
to its end, and leaves them as they were."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.support.polling import DEADLINE_SECONDS
from tests.support.running_job import RunningJob, assert_nothing_is_left, settings, steps_of
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

STEPS_OF_GUEST = 3
WITHOUT_END = 1000
"""Steps of the two: they are stopped, so that they are there for as long as the guest is, however slow the machine."""
RUN = {
    "sampling": {"max_tokens": 16},
    "schedule": {"group_size": 4, "rollouts_per_step": 16, "max_inflight_rollouts": 16},
    "filters": [],
}
REVERSE, GUESS = [{"name": "reverse", "kind": "reverse-text"}], [{"name": "guess", "kind": "guess-number"}]


def training(rank: int) -> dict[str, Any]:
    return {"learning_rate": 1e-3, "checkpoint_interval": 2, "lora": {"rank": rank}}


def write_job(directory: Path, server: ServerProcess) -> Path:
    """Two runs of different tasks and ranks, with a place for a third."""
    base = settings(directory / "output", server=server)
    job = {
        **{key: base[key] for key in ("output_dir", "max_restarts", "model", "inference")},
        "trainer": base["trainer"] | {"max_runs": 3},
        "orchestrator": {
            **RUN,
            "steps": WITHOUT_END,
            "environments": REVERSE,
            "inference": base["orchestrator"]["inference"],
        },
        "runs": [
            {"run_id": "reverse", "training": training(8)},
            {"run_id": "guess", "training": training(4), "environments": GUESS},
        ],
    }
    file = directory / "job.toml"
    file.write_text(tomli_w.dumps(job))
    return file


def write_guest(directory: Path) -> Path:
    guest = {**RUN, "run_id": "guest", "steps": STEPS_OF_GUEST, "environments": GUESS, "training": training(8)}
    file = directory / "guest.toml"
    file.write_text(tomli_w.dumps(guest))
    return file


def counterpoint(*words: str) -> str:
    """What a command printed that came to a good end."""
    command = [sys.executable, "-m", "counterpoint.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def trained_steps(directory: Path, run_id: str) -> list[int]:
    """The steps of one run in the trainer's metrics, in their order."""
    file = directory / "trainer" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line["step"] for line in lines if line["run_id"] == run_id]


@pytest.mark.promise("many runs share one trainer and one fleet")
def test_a_guest_joins_two_runs_and_ends_and_they_are_trained_on(tmp_path: Path, adapter_server: ServerProcess) -> None:
    job = RunningJob(write_job(tmp_path, adapter_server), tmp_path / "output")
    output = job.output_dir
    try:
        job.wait_for("the trainer's first lines", (output / "trainer" / "metrics.jsonl").exists)
        job.wait_for("a step of each", lambda: all(trained_steps(output, run_id) for run_id in ("reverse", "guess")))
        counterpoint("orchestrator", str(write_guest(tmp_path)), "--join", str(output))
        before = {run_id: len(trained_steps(output, run_id)) for run_id in ("reverse", "guess")}
        for run_id, count in before.items():
            job.wait_for(f"a step of {run_id}", lambda: len(trained_steps(output, run_id)) > count)  # noqa: B023
        assert re.search(r"guest +done +3/3", counterpoint("status", str(output)))
        for run_id in before:
            assert "has stopped" in counterpoint("stop", run_id, "--job", str(output))
        assert job.wait() == 143, job.output()  # both were stopped before their last step
        assert_nothing_is_left(job)
    finally:
        job.end()
    summary = json.loads((output / "summary.json").read_text())["runs"]
    assert set(summary) == {"reverse", "guess", "guest"}
    assert summary["guest"]["outcome"] == "done"
    for run_id, run in summary.items():
        trained = trained_steps(output, run_id)
        assert trained == list(range(1, len(trained) + 1)), "each step once, in order, beside the others"
        shipped = steps_of(output / f"run_{run_id}" / "metrics.jsonl")
        assert shipped == list(range(1, len(shipped) + 1))
        assert run["rollouts"]["failed"] == 0
        assert run["staleness_max"] <= 4
    assert trained_steps(output, "guest")[-1] == STEPS_OF_GUEST
