"""Supervised fine-tuning by its command, then a job that begins with the result and has a teacher: both all real, on one vLLM.

The conversations teach an answer that the base model never gives. The teacher is the base model under the run's adapter, as by
default, so the job unlearns that answer, without using the reward.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.support.polling import DEADLINE_SECONDS
from tests.support.running_job import RunningJob, assert_nothing_is_left, settings
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

STEPS = 32
EPOCHS = 6
LORA = {"rank": 8}
ANSWER = "zzzz"


def conversation(word: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"Reverse: {word}"}, {"role": "assistant", "content": ANSWER}]}


def sft_file(directory: Path, model: str) -> Path:
    file = directory / "sft.toml"
    fields = {
        "output_dir": str(directory / "sft"),
        "model": model,
        "epochs": EPOCHS,
        "samples_per_step": 4,
        "data": {
            "rows": [conversation(word) for word in ("abc", "stone", "day", "word", "river", "cup", "lamp", "tree")]
        },
        "training": {"learning_rate": 3e-3, "lora": LORA},
        "trainer": {"device": "cpu", "max_tokens": 2048},
    }
    file.write_text(tomli_w.dumps(fields))
    return file


def job_file(directory: Path, server: ServerProcess, adapter: Path) -> Path:
    job = settings(directory / "output", server=server, steps=STEPS)
    job["orchestrator"] |= {
        "run_id": "distilled",
        "schedule": {"group_size": 1, "rollouts_per_step": 16, "max_inflight_rollouts": 16},
        "sampling": {"temperature": 1.0, "max_tokens": 16},
        "teacher": {},
        "training": {
            "learning_rate": 1e-3,
            "lora": LORA | {"start_from": str(adapter)},
            "loss": {"kind": "distillation"},
        },
    }
    file = directory / "job.toml"
    file.write_text(tomli_w.dumps(job))
    return file


def trained(directory: Path, metric: str) -> list[float]:
    """The values of one of the trainer's metrics, by step."""
    return [json.loads(line)[metric] for line in (directory / "trainer" / "metrics.jsonl").read_text().splitlines()]


def share_of_taught(directory: Path, step: int) -> float:
    """The share of the answers' letters, in the rollouts of a step, that is the letter that was taught."""
    lines = (directory / "run_distilled" / "rollouts" / f"step_{step}" / "rollouts.jsonl").read_text().splitlines()
    written = "".join(json.loads(line)["turns"][0]["completion"].removesuffix("<|end|>") for line in lines)
    return written.count(ANSWER[0]) / len(written)


def test_a_job_begins_with_what_sft_taught_and_its_teacher_takes_that_away(
    tmp_path: Path, adapter_server: ServerProcess
) -> None:
    command = [
        sys.executable,
        "-m",
        "counterpoint.cli.main",
        "sft",
        str(sft_file(tmp_path, adapter_server.config.model)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    loss = trained(tmp_path / "sft", "loss")
    assert loss[-1] < 0.2 * loss[0], loss

    adapter = tmp_path / "sft" / "run_sft" / "broadcast" / f"step_{len(loss)}"
    job = RunningJob(job_file(tmp_path, adapter_server, adapter), tmp_path / "output")
    try:
        assert job.wait() == 0, job.output()
        assert_nothing_is_left(job)
    finally:
        job.end()
    divergence = trained(tmp_path / "output", "custom_loss/reverse_kl")
    assert len(divergence) == STEPS
    assert divergence[-1] < 0.1 * divergence[0], divergence
    assert share_of_taught(tmp_path / "output", 1) > 0.5, "the job did not begin with the result of SFT"
    assert share_of_taught(tmp_path / "output", STEPS) < 0.25
