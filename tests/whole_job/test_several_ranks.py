"""A job whose trainer is two ranks, on one node and then on two: a rank and a node are killed, Ctrl-C interrupts it, and it ends
where an undisturbed training ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from counterpoint.job.processes_file import read_workers
from counterpoint.transport.codec import read_file
from perf.chaos.witness import Witness
from tests.support.obedient_inference import ObedientInference
from tests.support.running_job import STEPS, RunningJob, assert_nothing_is_left, settings, steps_of
from tests.support.tiny_model import make_model
from tests.trainer.lone_run import make_lone_run

pytestmark = pytest.mark.slow

ROLLOUTS = 16
"""The rollouts of a step."""


def completions_for(steps: int) -> int:
    """As many as so many steps surely need, and too few for one more."""
    return ROLLOUTS * (steps + 1) - 1


def write_job(directory: Path, model: Path, url: str, **trainer: int) -> Path:
    """The job's file. Its orchestrator keeps the batches that it deletes in `notes`."""
    job = settings(directory / "output", max_restarts=3)
    keep = {"notes": str(directory / "notes")}
    job["model"] = str(model)
    job["inference"] = {"replicas": 0, "max_model_len": 256}
    job["trainer"] |= {"threads": 1, **trainer}
    job["orchestrator"] |= {
        "inference": {"urls": [url]},
        "environments": [{"name": "reverse", "kind": "perf.chaos.batch_copies:KeptReverseText", "args": keep}],
        "schedule": {"group_size": 4, "rollouts_per_step": ROLLOUTS, "max_inflight_rollouts": 8},
    }
    file = directory / "job.toml"
    file.write_text(tomli_w.dumps(job))
    return file


def pid_of_rank(job: RunningJob, rank: int) -> int:
    """The process of a rank, by the variable that torch's agent gives it."""
    (pid,) = [
        pid
        for pid, command in job.processes().items()
        if "counterpoint.trainer.rank_process" in command
        and f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    return pid


def test_a_killed_rank_ctrl_c_another_layout_and_a_killed_node_cost_nothing(tmp_path: Path) -> None:
    """First two ranks on one node; the resumed job has them on two."""
    make_model(tmp_path / "model", moe=False, seed=3)
    metrics = tmp_path / "output" / "trainer" / "metrics.jsonl"
    checkpoints = tmp_path / "output" / "trainer" / "killed" / "checkpoints"
    with ObedientInference(completions_for(4)) as inference:
        job = RunningJob(write_job(tmp_path, tmp_path / "model", inference.url, processes=2), tmp_path / "output")
        try:
            job.wait_for("step 4", lambda: 4 in steps_of(metrics))
            os.kill(pid_of_rank(job, 0), signal.SIGKILL)  # its newest checkpoint is that of step 3
            job.wait_for("the restart", lambda: "rank 0 was ended by SIGKILL" in job.output())
            inference.permitted = completions_for(5)
            job.wait_for("step 5", lambda: 5 in steps_of(metrics))
            os.killpg(job.process.pid, signal.SIGINT)
            assert job.wait() == 130, job.output()
            assert_nothing_is_left(job)
        finally:
            job.end()
        assert steps_of(metrics) == list(range(1, 6))
        assert (checkpoints / "step_5" / "STABLE").exists()
        inference.permitted = completions_for(7)
        file = write_job(tmp_path, tmp_path / "model", inference.url, processes=1, nodes=2)
        job = RunningJob(file, job.output_dir, ("--resume",))
        try:
            job.wait_for("step 7", lambda: 7 in steps_of(metrics))
            nodes = {worker["name"]: worker["pid"] for worker in read_workers(job.output_dir)}
            os.kill(nodes["trainer-1"], signal.SIGKILL)  # the newest checkpoint is that of step 6
            job.wait_for("the restart", lambda: "trainer-1 was killed by SIGKILL: restarting" in job.output())
            inference.permitted = completions_for(2 * STEPS)
            assert job.wait() == 0, job.output()
            assert_nothing_is_left(job)
        finally:
            job.end()
    assert "trainer-0 ready" in job.output()
    assert steps_of(metrics) == list(range(1, STEPS + 1))
    assert steps_of(tmp_path / "output" / "run_killed" / "metrics.jsonl") == list(range(1, STEPS + 1))
    assert_ends_as_undisturbed(tmp_path, load_file(checkpoints / f"step_{STEPS}" / "state.safetensors"))


def assert_ends_as_undisturbed(directory: Path, state: dict[str, Any]) -> None:
    """Asserts that one rank that trains the same batches has the same weights in the end, up to the order of sums."""
    alone = make_lone_run(
        directory / "alone", directory / "model", {"max_tokens": 4096}, steps=STEPS, learning_rate=1e-4
    )
    before = alone.weights()
    for step in range(1, STEPS + 1):
        alone.train(read_file(Witness.copy_of(directory / "notes", "killed", step), 2**30))
    after = alone.weights()
    moved = torch.cat([(after[name] - before[name]).abs().flatten() for name in after]).mean()
    apart = torch.cat([(after[name] - state[f"master.{name}"]).abs().flatten() for name in after]).mean()
    assert apart < 0.01 * moved, f"{apart} is more than the order of sums explains, of {moved}"
