"""`counterpoint run` on environments of the verifiers library: real vLLM, trainer and orchestrator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w

from tests.environments.verifiers_library.conftest import SAMPLES
from tests.support.running_job import RunningJob, assert_nothing_is_left, settings
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STEPS = 2


def test_a_job_trains_on_them(moe_server: ServerProcess, tmp_path: Path) -> None:
    file, output_dir = tmp_path / "job.toml", tmp_path / "out"
    job_settings = settings(output_dir, server=moe_server)
    job_settings["orchestrator"]["steps"] = STEPS
    job_settings["orchestrator"]["environments"] = [
        {"name": "debate", "kind": "verifiers", "args": {"id": str(SAMPLES / "debate.py"), "env": {"rounds": 2}}}
    ]
    file.write_text(tomli_w.dumps(job_settings))
    job = RunningJob(file, output_dir)
    try:
        assert job.wait() == 0, job.output()
    finally:
        job.end()
    assert_nothing_is_left(job)
    summary = json.loads((output_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]["trained"]) == ("done", STEPS)
    lines = [json.loads(line) for line in (output_dir / "run_killed/metrics.jsonl").read_text().splitlines()]
    assert [line["rollouts/failed"] for line in lines] == [0] * STEPS
    for line in lines:
        assert line["environment/debate/solver/turns/mean"] == 2
        assert line["environment/debate/judge/turns/mean"] == 1
        # The judge says something once, the solver twice.
        assert 0 < line["tokens/untrained"] < line["tokens/completion"] / 2
        assert {"reward/debate/player/solver/mean", "reward/debate/player/solver-2/mean"} <= line.keys()
