"""Evaluations beside training on a real vLLM give what `counterpoint eval` gives of the same weights, token for token."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
import tomli_w

from counterpoint.cli.main import main
from counterpoint.job.derive import IDENTITY_FILE
from counterpoint.orchestrator.daemon import run
from counterpoint.run.config import RunConfig
from counterpoint.transport.files.atomic import publish_directory, published_steps
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.support.ports import free_port
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STEPS = 3
EVALUATION: dict[str, Any] = {
    "name": "greedy",
    "environments": [{"name": "held-out", "kind": "reverse-text", "args": {"seed": 7}}],
    "interval": 1,
    "examples": 8,
    "rollouts_per_example": 2,
    "pass_at": [1, 2],
    "success": 0.05,
    "sampling": {"temperature": 0.01, "top_k": 1, "max_tokens": 24},
    "keep_best": "reward/mean",
}


class AdapterTrainer(ScriptedTrainer):
    """Publishes the adapters of the test's server, one a step."""

    def __init__(self, server: ServerProcess, config: RunConfig) -> None:
        super().__init__(config.output_dir, config.run_id, config.steps)
        self._adapters = server.directories
        self._to = config.run_dir / "broadcast"

    def _publish(self, version: int) -> None:
        if version not in published_steps(self._to):
            with publish_directory(self._to / f"step_{version}") as partial:
                for file in self._adapters[version].iterdir():
                    if file.is_file() and file.name != "STABLE":
                        shutil.copyfile(file, partial / file.name)


def results_in(directory: Path, records: Path) -> tuple[dict[str, Any], dict[tuple[int, str], tuple[str, float]]]:
    """The newest line, and completion and reward of each rollout by example and number."""
    line = [orjson.loads(line) for line in (directory / "evaluations.jsonl").read_bytes().splitlines()][-1]
    found = [orjson.loads(record) for record in records.read_bytes().splitlines()]
    return line, {
        (each["example_index"], each["rollout_id"].rpartition("-")[2]): (each["turns"][0]["completion"], each["reward"])
        for each in found
    }


def test_an_evaluation_beside_training_equals_one_alone(lora_server: ServerProcess, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "run_id": "evaluated",
        "output_dir": str(tmp_path / "job"),
        "model": lora_server.config.model,
        "steps": STEPS,
        "environments": [{"name": "training", "kind": "reverse-text"}],
        "sampling": {"max_tokens": 16},
        "schedule": {"group_size": 2, "rollouts_per_step": 8, "max_inflight_rollouts": 16},
        "evaluations": [EVALUATION],
        "training": {"lora": {"rank": 4}},
    }
    here = {"urls": [lora_server.url], "api_key_file": str(lora_server.config.api_key_file)}
    config = RunConfig.model_validate(values | {"inference": here})
    with AdapterTrainer(lora_server, config):
        assert run(config, lambda: None) == 0
    lines = [orjson.loads(line) for line in (config.run_dir / "evaluations.jsonl").read_bytes().splitlines()]
    assert all(line["policy_version/min"] == line["policy_version/max"] == line["step"] for line in lines), lines
    assert lines[-1]["step"] == STEPS
    assert all(line["rollouts/completed"] == 16 for line in lines), lines

    # On the running server, of the first evaluated step, which was evaluated while others were trained and loaded.
    first = lines[0]["step"]
    file = tmp_path / "orchestrator.toml"
    file.write_text(tomli_w.dumps(values | {"inference": here}))
    arguments = ["--server", lora_server.url, "--checkpoint", str(lora_server.directories[first])]
    assert main(["eval", str(file), *arguments, "--output", str(tmp_path / "alone")]) == 0
    of_step = config.run_dir / f"evaluations/greedy/step_{first}/rollouts.jsonl"
    _, beside = results_in(config.run_dir, of_step)
    line, alone = results_in(tmp_path / "alone", tmp_path / "alone/greedy/rollouts.jsonl")
    assert alone == beside
    assert len(alone) == 16
    assert line["metrics"] == lines[0]["metrics"]
    assert line["step"] == first

    # On a server of its own, of the kept best weights.
    (best,) = published_steps(config.run_dir / "best")
    job = tmp_path / "job.toml"
    server = {"port": free_port(), "dtype": "float32", "max_model_len": 512, "max_num_seqs": 32}
    run_values = {key: value for key, value in values.items() if key not in ("output_dir", "model")}
    top = {"output_dir": str(tmp_path / "other"), "model": lora_server.config.model}
    job.write_text(tomli_w.dumps(top | {"inference": server, "trainer": {}, "orchestrator": run_values}))
    key = tmp_path / "other" / IDENTITY_FILE  # as of a job that has run with this port
    key.parent.mkdir()
    key.write_text("0" * 64)
    key.chmod(0o600)
    arguments = ["--checkpoint", str(config.run_dir / "best"), "--output", str(tmp_path / "own")]
    assert main(["eval", str(job), *arguments]) == 0
    line, own = results_in(tmp_path / "own", tmp_path / "own/greedy/rollouts.jsonl")
    assert own == results_in(config.run_dir, config.run_dir / f"evaluations/greedy/step_{best}/rollouts.jsonl")[1]
    assert line["step"] == best
    assert line["metrics"] == next(each["metrics"] for each in lines if each["step"] == best)
