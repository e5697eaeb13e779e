"""A whole job on a vLLM that runs already: `counterpoint run` starts none, uses that one, and leaves it running.

The weights go from memory to memory: the trainer publishes them in shared memory, and the orchestrator sends them, or the server
reads them itself. What is trained is the example of an agent that only knows a base URL, as it stands.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

from counterpoint.inference.clients.client import BinaryClient
from counterpoint.inference.clients.http_sessions import HttpSessions, call
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.sent_weights import SEND_PATH
from counterpoint.job.reading.status import read_status
from tests.support.running_job import RunningJob, assert_nothing_is_left, settings
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples/agent"
STEPS = 2


async def loads_by(path: str, server: ServerProcess) -> int:
    """How often the server has loaded weights by requests to `path`, by its own count."""
    async with HttpSessions(PoolConfig()) as connections:
        counts = bytes(await call(connections.admin, f"{server.url}/metrics", None)).decode()
    counted = rf'^http_requests_total{{handler="{path}",method="POST",status="2xx"}} ([\d.]+)$'
    found = re.search(counted, counts, re.MULTILINE)
    return 0 if found is None else int(float(found[1]))


async def test_a_job_uses_a_server_that_runs_already_and_trains_an_agent_with_the_stock_client(
    moe_server: ServerProcess, tmp_path: Path
) -> None:
    [environment] = tomllib.loads((EXAMPLE / "job.toml").read_text())["orchestrator"]["environments"]
    environment["args"]["command"] = [sys.executable, str(EXAMPLE / "guess.py")]
    file, output_dir = tmp_path / "job.toml", tmp_path / "out"
    before = await loads_by(SEND_PATH, moe_server)
    job_settings = settings(output_dir, server=moe_server)
    job_settings["orchestrator"] |= {
        "steps": STEPS,
        "environments": [environment],
        "schedule": {"group_size": 2, "rollouts_per_step": 4, "max_inflight_rollouts": 4, "max_lead_steps": 1},
    }
    job_settings["orchestrator"].setdefault("inference", {})["send_weights"] = True
    held_out = {"name": "reverse", "kind": "reverse-text"}
    job_settings["orchestrator"]["evaluations"] = [{"name": "last", "environments": [held_out], "examples": 2}]
    file.write_text(tomli_w.dumps(job_settings))
    job = RunningJob(file, output_dir)
    try:
        assert job.wait() == 0, job.output()
    finally:
        job.end()
    assert_nothing_is_left(job)
    assert f"inference by servers that run already: {moe_server.url}" in job.output()
    found = read_status(output_dir)
    assert [worker["name"] for worker in found.workers] == ["trainer", "orchestrator"]
    assert found.last_errors() == {}
    summary = json.loads((output_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]["shipped"], summary["steps"]["trained"]) == ("done", STEPS, STEPS)
    log = (output_dir / "orchestrator.log").read_text()
    served = [int(version) for version in re.findall(r"requests begin with policy version (\d+)", log)]
    assert served in ([0, 1, STEPS], [0, STEPS])  # a version is left out if a newer one is published meanwhile
    assert await loads_by(SEND_PATH, moe_server) - before == len(served)
    async with HttpSessions(PoolConfig()) as connections:
        await BinaryClient(moe_server.url, connections).identify()  # it serves on
    assert "proven in" in log
    sampled, trained = (
        {line["step"]: line for line in map(json.loads, file.read_text().splitlines())}
        for file in (output_dir / "run_killed" / "metrics.jsonl", output_dir / "trainer" / "metrics.jsonl")
    )
    for step in range(1, STEPS + 1):
        assert sampled[step]["rollouts/completed"] >= 4
        assert sampled[step]["rollouts/failed"] == 0
        assert trained[step]["tokens/trained"] == sampled[step]["tokens/completion"] > 0
