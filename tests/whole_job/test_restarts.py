"""Any process of a job may be killed at any moment: it comes back by itself, vLLM, too, and every step is trained exactly once.

The job starts its own vLLM. It has a file of its own so that it runs beside the tests that share a server.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.running_job import RunningJob, assert_nothing_is_left, steps_of, write_config
from tests.whole_job.kill_and_resume import assert_resumes, kill, records_of, started_and_trained

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

STEPS = 24
"""The job is ended twice, each time with steps left."""


def test_what_is_killed_comes_back_by_itself_and_a_job_that_ends_is_resumed(tmp_path: Path, tiny_moe: Path) -> None:
    """Each role is killed once, while the others live on; then Ctrl-C ends the job; then a killed vLLM ends it, which it may no
    longer restart. One after the other, which spares starts of vLLM."""
    job = started_and_trained(tmp_path, trained=1, max_restarts=3, steps=STEPS)
    trained = job.output_dir / "trainer" / "metrics.jsonl"
    try:
        for victim in (
            "counterpoint.inference.plugin.program",
            "counterpoint.cli.main trainer",
            "counterpoint.cli.main orchestrator",
        ):
            os.kill(job.pid_of(victim), signal.SIGKILL)
            # The trainer may have the batches of all steps that were committed by then, and one may be about to be written.
            before = len(steps_of(job.output_dir / "run_killed" / "metrics.jsonl")) + 1
            job.wait_for(f"a step after the death of {victim}", lambda: len(steps_of(trained)) > before)  # noqa: B023
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, job.output()
        assert_nothing_is_left(job)
    finally:
        job.end()
    for name in ("inference_0", "trainer", "orchestrator"):
        assert re.search(rf"{name} .*: restarting", job.output()), job.output()
    committed = records_of(job.output_dir)
    assert committed, "it was stopped before it had committed anything: the test proves nothing"
    before = len(steps_of(trained))
    job = RunningJob(write_config(tmp_path, steps=STEPS), job.output_dir, ("--resume",))
    try:
        job.wait_for("a step after the resume", lambda: len(steps_of(trained)) > before)
    except BaseException:
        job.end()
        raise
    kill(job, "counterpoint.inference.plugin.program", "inference_0")
    assert_resumes(job, STEPS)
    records = records_of(job.output_dir)
    assert {step: records[step] for step in committed} == committed, "a committed step was generated again"
