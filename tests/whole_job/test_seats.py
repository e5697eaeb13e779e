"""A job of two runs in the same episodes, all of it real: each is trained on its own turns by its own adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.support.running_job import RunningJob, assert_nothing_is_left, settings, steps_of
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

REPOSITORY = Path(__file__).parents[2]
STEPS = 2
WITHOUT_END = 1000
RUN = {
    "sampling": {"max_tokens": 12},
    "schedule": {"group_size": 4, "rollouts_per_step": 8, "max_inflight_rollouts": 16},
    "filters": [],
    "steps": WITHOUT_END,
    "training": {"learning_rate": 1e-3, "checkpoint_interval": 2, "lora": {"rank": 4}},
}


def write_job(directory: Path, server: ServerProcess) -> Path:
    base = settings(directory / "output", server=server)
    seat = {"name": "seat", "kind": "seat", "args": {"host": "hosting/debate", "seat": "opposite"}}
    job = {
        **{key: base[key] for key in ("output_dir", "max_restarts", "model", "inference")},
        "trainer": base["trainer"] | {"max_runs": 2},
        "orchestrator": RUN | {"inference": base["orchestrator"]["inference"]},
        "runs": [
            {
                "run_id": "hosting",
                "environments": [
                    {"name": "debate", "kind": "tests.whole_job.debate:Debate", "state_columns": ["text"]}
                ],
                "opponents": {"base": {"model": "base"}},
            },
            {"run_id": "seated", "environments": [seat | {"state_columns": ["example"]}]},
        ],
    }
    file = directory / "job.toml"
    file.write_text(tomli_w.dumps(job))
    return file


def records(run: Path) -> list[dict[str, Any]]:
    files = sorted(run.glob("rollouts/step_*/rollouts.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if line["outcome"] == "completed"]


def test_two_runs_are_trained_in_the_same_episodes(
    tmp_path: Path, adapter_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    job = RunningJob(write_job(tmp_path, adapter_server), tmp_path / "output")
    runs = {name: job.output_dir / f"run_{name}" for name in ("hosting", "seated")}
    try:
        for name, run in runs.items():
            job.wait_for(f"steps of {name}", lambda: len(steps_of(run / "metrics.jsonl")) >= STEPS)  # noqa: B023
        trained = job.output_dir / "trainer" / "metrics.jsonl"
        job.wait_for("the trainer's first lines", trained.exists)
        job.wait_for("the training of both", lambda: all(f'"{name}"' in trained.read_text() for name in runs))
        job.process.terminate()
        assert job.wait() == 143, job.output()
        assert_nothing_is_left(job)
    finally:
        job.end()
    hosted, seated = records(runs["hosting"]), records(runs["seated"])
    assert hosted
    assert seated
    for record in hosted:
        assert len(record["turns"]) == 2
        assert [turn["opponent"] for turn in record["opponent_turns"]] == ["base"]
    said = {turn["completion"] for record in seated for turn in record["turns"]}
    for record in seated:
        assert len(record["turns"]) == 1
    answered = [record["state"]["text"] for record in hosted]
    assert any(any(text and text in each for each in said) for text in answered), "one run heard what the other said"
    for run in runs.values():
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert sum(line["rollouts/failed"] for line in lines) == 0
        assert all(0 <= line["inference/cache_hit_share"] <= 1 for line in lines)
