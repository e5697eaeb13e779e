"""Jobs that lose a process in the middle of a step and are resumed: what must hold afterwards."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

from counterpoint.verify.report import SOUND
from counterpoint.verify.run import verify
from tests.support.running_job import STEPS, RunningJob, assert_nothing_is_left, steps_of, write_config
from tests.support.vllm_server import ServerProcess


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
    for part in ("run_killed", "trainer"):
        assert (found := steps_of(job.output_dir / part / "metrics.jsonl")) == every, f"{part}: {found}"
    records = records_of(job.output_dir)
    assert sorted(records) == every, sorted(records)
    assert {step: records[step] for step in committed} == committed, "a committed step was generated again"
    report = verify(job.output_dir / "run_killed")
    assert (report.code, report.steps) == (SOUND, steps), report.text()
    assert report.checked["steps that the trainer noted"] == steps
    assert report.checked["weights that the trainer noted"] > 0


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
