"""Any process of a job may be killed at any moment: `--resume` goes on, and every step is trained exactly once.

Each test runs a whole job with the vLLM server of the session, which spares starts of 20 s, kills a process in the middle of a
step, and resumes. One job sends the weights out of memory; with the other the server reads files, as by default. What vLLM's
own death does is in `test_restarts.py`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.running_job import STEPS, RunningJob, steps_of
from tests.support.vllm_server import ServerProcess
from tests.whole_job.kill_and_resume import assert_resumes, kill, records_of, started_and_trained

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

ALL_STEPS = list(range(1, STEPS + 1))
MORE_STEPS = 12
"""The steps of a job that is ended twice, each time with steps left."""


@pytest.mark.promise("any process may be killed, and each step is trained once")
def test_a_killed_orchestrator_and_then_a_killed_trainer_lose_and_repeat_nothing(
    tmp_path: Path, moe_server: ServerProcess
) -> None:
    """One job for both, which spares the start of another."""
    job = started_and_trained(tmp_path, trained=4, server=moe_server, steps=MORE_STEPS, sends_weights=True)
    kill(job, "counterpoint.cli.main orchestrator", "orchestrator")
    committed = records_of(job.output_dir)
    assert committed, "it was killed before it had committed anything: the test proves nothing"
    trained = job.output_dir / "trainer" / "metrics.jsonl"
    before = len(steps_of(trained))
    job = RunningJob(job.config_file, job.output_dir, ("--resume",))
    try:
        job.wait_for("two steps after the resume", lambda: len(steps_of(trained)) > before + 1)
    except BaseException:
        job.end()
        raise
    kill(job, "counterpoint.cli.main trainer", "trainer")
    assert_resumes(job, MORE_STEPS)
    records = records_of(job.output_dir)
    assert {step: records[step] for step in committed} == committed, "a committed step was generated again"


def test_a_trainer_killed_after_the_last_commit_trains_what_it_lost_without_inference(
    tmp_path: Path, moe_server: ServerProcess
) -> None:
    """And a job that is done stays as it is."""
    job = started_and_trained(tmp_path, trained=STEPS - 4, server=moe_server)
    trained = job.output_dir / "trainer" / "metrics.jsonl"
    try:
        trainer = job.pid_of(
            "counterpoint.cli.main trainer"
        )  # already: the last two batches may wait at it, and are soon trained
        job.wait_for(f"step {STEPS - 2}", lambda: len(steps_of(trained)) >= STEPS - 2)
        os.kill(trainer, signal.SIGSTOP)  # the orchestrator may lead by two steps, which are the last ones
        job.wait_for("the last commit", lambda: steps_of(job.output_dir / "run_killed" / "metrics.jsonl") == ALL_STEPS)
        os.kill(trainer, signal.SIGKILL)
        assert job.wait() == 1, job.output()
    finally:
        job.end()
    nobody = f"http://127.0.0.1:{free_port()}"
    job.config_file.write_text(job.config_file.read_text().replace(moe_server.url, nobody))
    assert_resumes(job)
    summary = (job.output_dir / "summary.json").read_bytes()
    again = RunningJob(job.config_file, job.output_dir, ("--resume",))
    try:
        assert again.wait() == 0, again.output()
    finally:
        again.end()
    assert f"is done: {STEPS} of {STEPS} steps" in again.output()
    assert (job.output_dir / "summary.json").read_bytes() == summary
