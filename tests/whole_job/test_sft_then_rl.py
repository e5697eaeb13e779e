"""A job with `[sft]`: fine-tuning first, then rollouts with its weights; killed in each phase and between them, and resumed."""

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
from safetensors.numpy import load_file

from tests.support.polling import DEADLINE_SECONDS
from tests.support.running_job import RunningJob, assert_nothing_is_left, settings, steps_of
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

STEPS = 3
LORA = {"rank": 8}
ANSWER = "zzzz"
SFT: dict[str, Any] = {
    "epochs": 24,
    "samples_per_step": 4,
    "data": {
        "rows": [
            {"messages": [{"role": "user", "content": f"Reverse: {word}"}, {"role": "assistant", "content": ANSWER}]}
            for word in ("abc", "stone", "day", "word", "river", "cup", "lamp", "tree")
        ]
    },
    "training": {"learning_rate": 3e-3, "checkpoint_interval": 4},
}
SFT_STEPS = 48


def job_file(directory: Path, server: ServerProcess) -> Path:
    job = settings(directory / "output", server=server, steps=STEPS) | {"sft": SFT}
    job["orchestrator"] |= {"training": {"learning_rate": 1e-6, "lora": LORA}}
    file = directory / "job.toml"
    file.write_text(tomli_w.dumps(job))
    return file


def alone(directory: Path, model: str) -> Path:
    """The weights of the same fine-tuning by its command, without a break."""
    training = SFT["training"] | {"lora": LORA}
    trainer = {"device": "cpu", "max_tokens": 4096}
    fields = SFT | {"output_dir": str(directory / "alone"), "model": model, "training": training, "trainer": trainer}
    (directory / "sft.toml").write_text(tomli_w.dumps(fields))
    command = [sys.executable, "-m", "counterpoint.cli.main", "sft", str(directory / "sft.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return directory / "alone" / "run_sft" / "broadcast" / f"step_{SFT_STEPS}" / "adapter_model.safetensors"


def kill(job: RunningJob) -> None:
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    assert_nothing_is_left(job)


def test_each_phase_is_trained_once_whenever_the_job_is_killed(tmp_path: Path, adapter_server: ServerProcess) -> None:
    output, file = tmp_path / "output", job_file(tmp_path, adapter_server)
    sft, done = output / "sft" / "trainer" / "metrics.jsonl", output / "sft" / "done.json"
    jobs = [RunningJob(file, output)]
    try:
        jobs[-1].wait_for("some steps of the fine-tuning", lambda: sft.exists() and len(steps_of(sft)) > 6)
        kill(jobs[-1])
        assert not done.exists()

        jobs.append(RunningJob(file, output, ("--resume",)))
        jobs[-1].wait_for("the end of the fine-tuning", done.exists)
        kill(jobs[-1])
        done.unlink()  # as if it had been killed a moment earlier

        jobs.append(RunningJob(file, output, ("--resume",)))
        rollouts = output / "run_killed" / "metrics.jsonl"
        jobs[-1].wait_for("a step of the rollouts", lambda: rollouts.exists() and len(steps_of(rollouts)) > 0)
        kill(jobs[-1])

        jobs.append(RunningJob(file, output, ("--resume",)))
        assert jobs[-1].wait() == 0, jobs[-1].output()
        assert_nothing_is_left(jobs[-1])
    finally:
        for job in jobs:
            job.end()
    assert steps_of(sft) == [*range(1, SFT_STEPS + 1)]
    assert steps_of(rollouts) == [*range(1, STEPS + 1)]
    switched = [job.output().count("rollouts begin with its weights") for job in jobs[2:]]
    assert switched == [1, 0], "one line, where the phase ends"

    weights = output / "sft" / "run_sft" / "broadcast" / f"step_{SFT_STEPS}" / "adapter_model.safetensors"
    expected, found = load_file(alone(tmp_path, adapter_server.config.model)), load_file(weights)
    assert all((found[name] == values).all() for name, values in expected.items()), "as without a break"
    lines = (output / "run_killed" / "rollouts" / "step_1" / "rollouts.jsonl").read_text().splitlines()
    written = "".join(json.loads(line)["turns"][0]["completion"].removesuffix("<|end|>") for line in lines)
    assert written.count(ANSWER[0]) > 0.5 * len(written), "the rollouts did not begin with what was taught"
