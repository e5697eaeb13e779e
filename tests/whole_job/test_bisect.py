"""One rollout of a run spoils its policy: `counterpoint bisect` finds it in a live job, though it is killed while it plays."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import tomli_w

from counterpoint.cli.main import main
from counterpoint.job.directory import living_runs, orchestrator_of
from counterpoint.orchestrator.step.advantages import AdvantageInputs, AdvantageOutputs
from counterpoint.run.branches import origin_of
from counterpoint.transport.files.json_lines import read_lines
from counterpoint.verify.groups import example_at
from tests.support.ports import free_port
from tests.support.running_job import RunningJob

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

EXAMPLES = 1000
SPOILED = example_at(9, EXAMPLES, "0/reverse-text")
"""The example of the tenth group."""


def of_one_rollout(inputs: AdvantageInputs) -> AdvantageOutputs:
    """An advantage function by which one rollout alone is trained, of the group of one example."""
    return AdvantageOutputs(
        [float(rollout.example_index == SPOILED and index == 0) for index, rollout in enumerate(inputs.rollouts)]
    )


def settings(output_dir: Path) -> dict[str, object]:
    """A job whose learning rate lets one rollout spoil the policy."""
    return {
        "output_dir": str(output_dir),
        "model": "tiny-dense",
        "inference": {"port": free_port(), "dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 4096},
        "trainer": {"device": "cpu", "dtype": "float32", "max_tokens": 4096, "threads": 1, "max_runs": 2},
        "orchestrator": {
            "run_id": "old",
            "steps": 100,
            "keep_batches": 50,
            "filters": [],
            "advantage": {"kind": "tests.whole_job.test_bisect:of_one_rollout"},
            "environments": [{"name": "reverse-text", "kind": "reverse-text", "args": {"examples": EXAMPLES}}],
            "sampling": {"temperature": 0.3, "max_tokens": 16},
            "schedule": {"group_size": 4, "rollouts_per_step": 16, "max_lead_steps": 1, "max_off_policy_steps": 1},
            "training": {"learning_rate": 1.0, "keep_every": 1, "lora": {"rank": 4, "alpha": 8.0}},
        },
    }  # fmt: skip


def test_one_spoiled_rollout_is_found_though_the_command_is_killed(
    tmp_path: Path, tiny_dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "job.toml", tmp_path / "out"
    file.write_text(tomli_w.dumps(settings(output)))
    job = RunningJob(file, output)

    def rewards() -> dict[int, float]:
        metrics = output / "run_old" / "metrics.jsonl"
        return {line["step"]: line["reward/mean"] for _, line in read_lines(metrics)} if metrics.exists() else {}

    try:
        job.wait_for("a fall of the reward", lambda: sum(value < 0.1 for value in rewards().values()) > 1)
        assert main(["pause", "old", "--job", str(output)]) == 0
        bad = max(rewards())
        about = ["bisect", "old", "--good", "1", "--bad", str(bad), "--job", str(output)]
        assert main(about) == 0
        assert "16 rollouts" in capsys.readouterr().out
        assert not (output / "run_old-bisect-1").exists(), "without --start it only says what it takes"
        program = [sys.executable, "-m", "counterpoint.cli.main", *about, "--start"]
        with open(tmp_path / "killed.txt", "wb") as printed:
            first = subprocess.Popen(program, stdout=printed, stderr=subprocess.STDOUT)
        job.wait_for("a branch that plays", lambda: orchestrator_of(output, "old-bisect-2") is not None)
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL, (tmp_path / "killed.txt").read_text()
        assert main([*about, "--start"]) == 0, job.output()
        said = capsys.readouterr().out
        spoiled = [
            record["rollout_id"]
            for path in output.glob("run_old/rollouts/step_*/rollouts.jsonl")
            for record in map(orjson.loads, path.read_bytes().splitlines())
            if record["example_index"] == SPOILED
        ]
        assert f"rollout {sorted(spoiled)[0]} made reward/mean go bad" in said
        branches = sorted(output.glob("run_old-bisect-*"))
        assert 4 <= len(branches) <= 5, said
        played = [line for line in said.splitlines() if line.startswith("run old-bisect-")]
        assert len(played) == len(branches), (
            "each branch counts once, also the one that was killed and the one before it"
        )
        for each in branches:
            origin = origin_of(each)
            assert origin is not None
            assert origin.without
        assert living_runs(output) == ["old"]
    finally:
        job.end()
