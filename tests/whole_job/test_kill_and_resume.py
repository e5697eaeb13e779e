"""Any process of a job may be killed at any moment: `--resume` goes on, and every step is trained exactly once.

Each test runs a whole job with a real vLLM server, kills a process in the middle of a step, and resumes. Where that process is
neither vLLM's nor the supervisor's, the job uses the server of the session, which spares two starts of 20 s. Two of these send it
the weights out of memory; with the third it reads files, as by default.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.running_job import STEPS, RunningJob, assert_nothing_is_left, steps_of, write_config
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

ALL_STEPS = list(range(1, STEPS + 1))
MORE_STEPS = 24
"""Of a job that is ended twice, each time with steps left."""


def test_a_killed_orchestrator_loses_and_repeats_nothing(tmp_path: Path, moe_server: ServerProcess) -> None:
    kill_and_resume(tmp_path, "cli.main orchestrator", "orchestrator", moe_server)


def test_a_killed_trainer_loses_and_repeats_nothing(tmp_path: Path, moe_server: ServerProcess) -> None:
    kill_and_resume(tmp_path, "cli.main trainer", "trainer", moe_server)


def test_what_is_killed_comes_back_by_itself_and_a_job_that_ends_is_resumed(tmp_path: Path, tiny_moe: Path) -> None:
    """Each role is killed once, while the others live on; then Ctrl-C ends the job; then a killed vLLM ends it, which it may no
    longer restart. One after the other, which spares starts of vLLM."""
    job = started_and_trained(tmp_path, trained=1, max_restarts=3, steps=MORE_STEPS)
    trained = job.output_dir / "trainer" / "metrics.jsonl"
    try:
        for victim in ("inference.plugin.program", "cli.main trainer", "cli.main orchestrator"):
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
    job = RunningJob(write_config(tmp_path, steps=MORE_STEPS), job.output_dir, ("--resume",))
    try:
        job.wait_for("a step after the resume", lambda: len(steps_of(trained)) > before)
    except BaseException:
        job.end()
        raise
    kill(job, "inference.plugin.program", "inference_0")
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
        trainer = job.pid_of("cli.main trainer")  # already: the last two batches may wait at it, and are soon trained
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


def kill_and_resume(directory: Path, victim: str, name: str, server: ServerProcess) -> None:
    """Kills the process with `victim` in its command line while the step after the fourth is under way."""
    job = started_and_trained(directory, trained=4, server=server, sends_weights=True)
    kill(job, victim, name)
    assert_resumes(job)


def kill(job: RunningJob, victim: str, name: str) -> None:
    """Kills the process with `victim` in its command line, and asserts that the job ends with it and says so."""
    try:
        os.kill(job.pid_of(victim), signal.SIGKILL)
        assert job.wait() == 1, job.output()
        assert name in job.output(), "the message names the worker that died"
        assert_nothing_is_left(job)
    finally:
        job.end()


def started_and_trained(
    directory: Path,
    trained: int,
    max_restarts: int = 0,
    server: ServerProcess | None = None,
    steps: int = STEPS,
    sends_weights: bool = False,
) -> RunningJob:
    """Returns a job that has trained so many steps."""
    file = write_config(directory, max_restarts, server, steps, sends_weights)
    job = RunningJob(file, directory / "output")
    try:
        job.wait_for(f"step {trained}", lambda: len(steps_of(job.output_dir / "trainer" / "metrics.jsonl")) >= trained)
    except BaseException:
        job.end()
        raise
    return job


def assert_resumes(job: RunningJob, steps: int = STEPS) -> None:
    """Asserts that the job reaches its end with `--resume` and leaves what was committed before as it was."""
    committed = records_of(job.output_dir)
    assert committed, "the job was killed before it had committed anything: the test proves nothing"
    resumed = RunningJob(job.config_file, job.output_dir, ("--resume",))
    try:
        assert resumed.wait() == 0, resumed.output()
        assert_nothing_is_left(resumed)
    finally:
        resumed.end()
    every = list(range(1, steps + 1))
    assert steps_of(job.output_dir / "run_killed" / "metrics.jsonl") == every
    assert steps_of(job.output_dir / "trainer" / "metrics.jsonl") == every
    records = records_of(job.output_dir)
    assert sorted(records) == every
    assert {step: records[step] for step in committed} == committed, "a committed step was generated again"


def records_of(output_dir: Path) -> dict[int, str]:
    """Returns the digest of the rollouts' records of every committed step, by step."""
    run = output_dir / "run_killed"
    newest = max(
        (int(path.parent.name.removeprefix("step_")) for path in run.glob("checkpoints/step_*/STABLE")), default=0
    )
    return {
        step: hashlib.sha256((run / f"rollouts/step_{step}/rollouts.jsonl").read_bytes()).hexdigest()
        for step in range(1, newest + 1)
    }
