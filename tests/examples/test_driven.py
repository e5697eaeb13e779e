"""The example of a loop over a driven run: beside a real trainer and server it learns its text, and goes on after its end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from tests.support.polling import DEADLINE_SECONDS
from tests.support.ports import free_port
from tests.support.running_job import RunningJob


@pytest.mark.slow
@pytest.mark.vllm
def test_the_loop_learns_and_goes_on_where_it_was(tmp_path: Path) -> None:
    output, file = tmp_path / "output", tmp_path / "job.toml"
    job = {
        "output_dir": str(output),
        "model": "tiny-dense",
        "inference": {"port": free_port(), "dtype": "float32", "max_model_len": 64, "max_num_batched_tokens": 256},
        "trainer": {"device": "cpu", "max_tokens": 64},
        "tinker": {"port": free_port(), "max_rank": 8},
    }
    file.write_text(tomli_w.dumps(job))
    running = RunningJob(file, output, command="tinker")
    try:
        log = output / "service.log"
        running.wait_for("the service", lambda: log.exists() and "answers at" in log.read_text())
        command = [sys.executable, "-m", "examples.driven.loop", str(output)]
        said = [
            subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
            for _ in range(2)
        ]
    finally:
        running.end()
    assert [done.returncode for done in said] == [0, 0], said
    steps = [
        (int(step), float(loss))
        for step, loss in re.findall(r"step (\d+): loss (\S+)", said[0].stdout + said[1].stdout)
    ]
    assert [step for step, _ in steps] == list(range(1, 21))
    assert steps[-1][1] < steps[0][1] / 2
    assert all("goes on with" in done.stdout for done in said)
