"""Trials as runs of a real job, vLLM and trainer included: one is killed, then the tuner, and each step counts once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from counterpoint.job.directory import orchestrator_of, run_ids_in
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.support.running_job import RunningJob, assert_nothing_is_left, settings
from tests.support.vllm_server import ServerProcess
from tests.whole_job.test_many_runs import trained_steps

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

STEPS = 8
REVERSE = [{"name": "reverse", "kind": "reverse-text"}]


def write_job(directory: Path, server: ServerProcess) -> Path:
    base = settings(directory / "job", server=server)
    job = {
        **{key: base[key] for key in ("output_dir", "model", "inference")},
        "stay": True,
        "trainer": base["trainer"] | {"max_runs": 2},
        "orchestrator": {"training": {"lora": {"rank": 4}}, "inference": base["orchestrator"]["inference"]},
    }
    file = directory / "job.toml"
    file.write_text(tomli_w.dumps(job))
    return file


def write_experiment(directory: Path) -> Path:
    experiment: dict[str, Any] = {
        "name": "exp",
        "local_dir": str(directory / "experiments"),
        "executor": "runs",
        "num_samples": 2,
        "job": {"join": str(directory / "job")},
        "space": {"training": {"learning_rate": {"loguniform": [1e-4, 1e-2]}}},
        "run": {
            "steps": STEPS,
            "environments": REVERSE,
            "sampling": {"max_tokens": 16},
            "schedule": {"group_size": 4, "rollouts_per_step": 16, "max_inflight_rollouts": 16},
            "filters": [],
            "training": {"checkpoint_interval": 2, "lora": {"rank": 4}},
        },
    }
    file = directory / "tune.toml"
    file.write_text(tomli_w.dumps(experiment))
    return file


def tuner(directory: Path, *words: str) -> subprocess.Popen[bytes]:
    with open(directory / "tune.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "counterpoint.cli.main", "tune", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def counted(directory: Path) -> dict[str, list[int]]:
    """The steps in each trial's `result.json`."""
    found = {}
    for file in sorted((directory / "experiments" / "exp").glob("*/result.json")):
        whole, _, _ = file.read_text().rpartition("\n")
        found[file.parent.name] = [json.loads(line)["step"] for line in whole.splitlines()]
    return found


@pytest.mark.promise("a tuner that is killed repeats no result")
def test_a_killed_trial_and_a_killed_tuner_repeat_no_result(tmp_path: Path, adapter_server: ServerProcess) -> None:
    job = RunningJob(write_job(tmp_path, adapter_server), tmp_path / "job")
    started: list[subprocess.Popen[bytes]] = []

    def output() -> str:
        return (tmp_path / "tune.log").read_text() + job.output()

    try:
        job.wait_for("the job's file", (tmp_path / "job" / "job.json").exists)
        started.append(tuner(tmp_path, str(write_experiment(tmp_path))))
        wait_until(lambda: any(counted(tmp_path).values()), "a result", DEADLINE_SECONDS, output)
        runs = run_ids_in(job.output_dir)
        holder = orchestrator_of(job.output_dir, runs[0])
        if holder is not None:  # it may be done already
            os.kill(holder.pid, signal.SIGKILL)
        started[0].kill()
        started[0].wait()
        started.append(tuner(tmp_path, "resume", str(tmp_path / "experiments" / "exp")))
        assert started[1].wait(DEADLINE_SECONDS) == 0, output()
    finally:
        for process in started:
            process.kill()
            process.wait()
        job.process.terminate()
        try:
            job.process.wait(DEADLINE_SECONDS)
        finally:
            job.end()
    assert_nothing_is_left(job)
    assert list(counted(tmp_path).values()) == [list(range(1, STEPS + 1))] * 2
    for run_id in run_ids_in(job.output_dir):
        trained = trained_steps(job.output_dir, run_id)
        assert sorted(set(trained)) == list(range(1, STEPS + 1))
