"""The unmodified SDK trains, samples, saves and resumes with `counterpoint tinker FILE`, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from tests.support.polling import DEADLINE_SECONDS
from tests.support.ports import free_port
from tests.support.running_job import RunningJob, assert_nothing_is_left

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


def write_job(directory: Path) -> Path:
    file = directory / "job.toml"
    job = {
        "output_dir": str(directory / "output"),
        "model": "tiny-dense",
        "inference": {"port": free_port(), "dtype": "float32", "max_model_len": 64, "max_num_batched_tokens": 256},
        "trainer": {"device": "cpu", "max_tokens": 64, "max_runs": 4},
        "tinker": {"port": free_port(), "max_rank": 8},
    }
    file.write_text(tomli_w.dumps(job))
    return file


def test_the_unmodified_sdk_trains_samples_saves_and_resumes(tmp_path: Path) -> None:
    output = tmp_path / "output"
    job = RunningJob(write_job(tmp_path), output, command="tinker")
    client = None
    try:
        address = re.compile(r"answers at (http://\S+)")
        log = output / "service.log"
        job.wait_for("the service", lambda: log.exists() and address.search(log.read_text()) is not None)
        found = address.search(log.read_text())
        assert found is not None
        client = subprocess.Popen(
            [sys.executable, "-m", "tests.service.sdk_client", found[1], "tiny-dense"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "pause\n", job.output()
        for role in ("service", "trainer"):
            os.kill(job.pid_of(f"cli.main {role}"), signal.SIGKILL)
        seen, _ = client.communicate("go on\n", timeout=DEADLINE_SECONDS)
        assert client.returncode == 0, (job.output(), log.read_text())
        job.process.send_signal(signal.SIGTERM)
        job.wait()
        assert_nothing_is_left(job)
    finally:
        if client is not None:
            client.kill()
            client.wait()
        job.end()
    results = json.loads(seen.splitlines()[-1])
    assert results["rank"] == 4
    assert results["disturbed"] == results["undisturbed"], "the kill changed something"
    assert results["disturbed"][-1] < results["disturbed"][0] / 2, "nothing was learned"
    for sampled, trained in zip(results["sampled"], results["trained"], strict=True):
        assert trained == pytest.approx(sampled, abs=1e-2), "the sampler has other weights than the trainer"
    assert results["prompt_logprobs"][0] is None
    assert all(value < 0 for value in results["prompt_logprobs"][1:])
    assert results["named"] == 1
    assert [path.rpartition("/")[0].rpartition("/")[2] for path in results["paths"]] == ["weights", "sampler_weights"]
    first, resumed, fresh = results["resumed"]
    assert first == resumed
    assert first != fresh
    assert "stable_reinforce" in results["refused"]
