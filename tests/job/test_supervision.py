"""How a job that nobody can watch any more ends."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.attended.attended_job import AttendedJob
from cluster.manager.events import Outcome
from job.config import JobConfig
from job.configuration.load import load
from job.supervision import Show, SupervisedJob
from job.workers import sections_of, specification


@pytest.mark.parametrize("fault", ["show", "guests", "directory"])
def test_what_fails_after_the_job_has_ended_costs_neither_its_outcome_nor_its_summary(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    config = load(JobConfig, job_file, [])
    config.output_dir.mkdir()
    ended = False

    async def run(job: AttendedJob, *, adopt: bool = False) -> Outcome:
        nonlocal ended
        ended = True
        if fault == "directory":
            shutil.rmtree(config.output_dir)
        return Outcome(3, "a worker failed")

    def fail_at_the_end(*arguments: object) -> Any:
        if ended:
            raise OSError(5, "Input/output error")
        return []

    monkeypatch.setattr(AttendedJob, "run", run)
    if fault == "guests":
        monkeypatch.setattr("job.supervision.run_ids_in", fail_at_the_end)
    job = SupervisedJob(config, specification(config, dict.fromkeys(sections_of(config), job_file)), lambda text: None)
    show: Show = fail_at_the_end if fault == "show" else lambda workers, steps: None
    outcome = job.run(show)
    assert (outcome.code, outcome.reason) == (3, "a worker failed")
    assert job.summary(outcome)["outcome"] == "a worker failed"
    assert ("Input/output error" in caplog.text) == (fault != "directory")
