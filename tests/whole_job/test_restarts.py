"""vLLM may be killed at any moment: it comes back by itself, and every step is trained exactly once.

The job starts its own vLLM. It has a file of its own so that it runs beside the tests that share a server. The trainer and
orchestrators of a job are killed, and come back, in `tests/perf/test_chaos.py`.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.running_job import assert_nothing_is_left, steps_of
from tests.whole_job.kill_and_resume import assert_resumes, started_and_trained

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

STEPS = 12
"""The job is stopped with steps left."""


def test_a_killed_vllm_comes_back_by_itself_and_a_job_that_was_stopped_is_resumed(
    tmp_path: Path, tiny_moe: Path
) -> None:
    """In one job, which spares starts of vLLM. What ends a job that may restart nothing is in `tests/cluster/attended`."""
    job = started_and_trained(tmp_path, trained=1, max_restarts=1, steps=STEPS)
    trained = job.output_dir / "trainer" / "metrics.jsonl"
    try:
        os.kill(job.pid_of("inference.plugin.program"), signal.SIGKILL)
        # The trainer may have the batches of all steps that were committed by then, and one may be about to be written.
        before = len(steps_of(job.output_dir / "run_killed" / "metrics.jsonl")) + 1
        job.wait_for("a step after the death of vLLM", lambda: len(steps_of(trained)) > before)
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, job.output()
        assert_nothing_is_left(job)
    finally:
        job.end()
    assert re.search(r"inference_0 .*: restarting", job.output()), job.output()
    assert_resumes(job, STEPS)
