"""The example of an agent that only knows a base URL: trained by a real job, as it stands."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

from tests.support.running_job import RunningJob, assert_nothing_is_left, settings
from tests.support.vllm_server import ServerProcess

REPOSITORY = Path(__file__).parents[2]
STEPS = 2


@pytest.mark.slow
@pytest.mark.vllm
def test_an_agent_with_the_stock_client_is_trained(moe_server: ServerProcess, tmp_path: Path) -> None:
    [environment] = tomllib.loads((REPOSITORY / "examples/agent/job.toml").read_text())["orchestrator"]["environments"]
    environment["args"]["command"] = [sys.executable, str(REPOSITORY / "examples/agent/guess.py")]
    file, output_dir = tmp_path / "job.toml", tmp_path / "out"
    job_settings = settings(output_dir, server=moe_server)
    job_settings["orchestrator"] |= {
        "steps": STEPS,
        "environments": [environment],
        "schedule": {"group_size": 2, "rollouts_per_step": 4, "max_inflight_rollouts": 4, "max_lead_steps": 1},
    }
    file.write_text(tomli_w.dumps(job_settings))
    job = RunningJob(file, output_dir)
    try:
        assert job.wait() == 0, job.output()
    finally:
        job.end()
    assert_nothing_is_left(job)
    summary = json.loads((output_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]["trained"]) == ("done", STEPS)
    sampled, trained = (
        {line["step"]: line for line in map(json.loads, file.read_text().splitlines())}
        for file in (output_dir / "run_killed" / "metrics.jsonl", output_dir / "trainer" / "metrics.jsonl")
    )
    for step in range(1, STEPS + 1):
        assert sampled[step]["rollouts/completed"] >= 4
        assert sampled[step]["rollouts/failed"] == 0
        assert trained[step]["tokens/trained"] == sampled[step]["tokens/completion"] > 0
