"""The worker of `[tracking]` in a job, and `counterpoint track`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load
from counterpoint.job.workers import sections_of, specification
from tests.job.tracking.jobs import Job


def test_the_worker_of_tracking_comes_first_so_that_it_stops_after_those_that_write(job_file: Path) -> None:
    config = load(JobConfig, job_file, ["--tracking.wandb.mode", "offline"])
    files = {name: Path(name) for name in sections_of(config)}
    roles = specification(config, files).roles
    assert [role.name for role in roles if not role.essential] == ["tracking"]
    assert roles[0].name == "tracking"
    assert (roles[0].command or ())[-2:] == (str(config.output_dir.absolute()), "--follow")


@pytest.mark.slow
def test_the_metrics_of_a_job_that_has_ended_are_sent_by_the_command(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.steps(1, 2, 3)
    job.ship(4)
    command = [sys.executable, "-m", "counterpoint.cli.main", "track", str(tmp_path), "--to", "tensorboard"]
    said = subprocess.run(command, check=True, timeout=100, stdout=subprocess.PIPE, text=True).stdout
    assert said == f"tensorboard has all of {tmp_path}; tensorboard --logdir {tmp_path}/tracking/tensorboard\n"
    assert {step: "trainer/loss" in values for step, values in job.shown().items()} == {
        1: True,
        2: True,
        3: True,
        4: False,
    }
