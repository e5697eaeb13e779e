"""Any process of a job may be killed at any moment: it comes back by itself, vLLM, too, and every step is trained exactly once.

The job starts its own vLLM. It has a file of its own so that it runs beside the tests that share a server.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from counterpoint.job.reading.start import read_start
from counterpoint.transport.telemetry.start_phases import FIRST_STEP
from tests.support.running_job import steps_of
from tests.whole_job.kill_and_resume import assert_resumes, kill, started_and_trained

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

STEPS = 24
"""The job is ended with steps left."""


def test_what_is_killed_comes_back_by_itself_and_a_job_that_ends_is_resumed(tmp_path: Path, tiny_moe: Path) -> None:
    """Each role is killed once, while the others live on. Then vLLM is killed again, which may not be restarted and ends the job.
    One after the other, which spares starts of vLLM."""
    job = started_and_trained(tmp_path, trained=1, max_restarts=1, steps=STEPS)
    trained = job.output_dir / "trainer" / "metrics.jsonl"
    starts = {start.process: [each.phase for each in start.phases] for start in read_start(job.output_dir)}
    assert {*starts} == {
        "supervisor", "trainer", "orchestrator", "inference_0", "inference_0 API server", "inference_0 engine"
    }  # fmt: skip
    assert starts["orchestrator"][-1] == FIRST_STEP
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
        for name in ("inference_0", "trainer", "orchestrator"):
            assert re.search(rf"{name} (restarting: it |.*: restarting)", job.output()), job.output()
    except BaseException:
        job.end()
        raise
    kill(job, "counterpoint.inference.plugin.program", "inference_0")
    assert_resumes(job, STEPS)
