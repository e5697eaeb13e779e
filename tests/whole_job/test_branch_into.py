"""A branch of a live job that becomes a job of its own, by the command that is printed, while the other one goes on."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import tomli_w

from counterpoint.cli.main import main
from counterpoint.run.branches import origin_of
from counterpoint.transport.files.json_lines import read_lines
from tests.support.ports import free_port
from tests.support.running_job import RunningJob, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

STEPS = 9


def settings(output_dir: Path) -> dict[str, object]:
    return {
        "output_dir": str(output_dir),
        "model": "tiny-dense",
        "inference": {"port": free_port(), "dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 4096},
        "trainer": {"device": "cpu", "dtype": "float32", "max_tokens": 4096, "threads": 1},
        "orchestrator": {
            "run_id": "old",
            "steps": STEPS,
            "filters": [],
            "environments": [{"name": "reverse", "kind": "reverse-text"}],
            "sampling": {"max_tokens": 16},
            "schedule": {"group_size": 4, "rollouts_per_step": 16},
            "training": {"learning_rate": 1e-4, "keep_every": 1, "lora": {"rank": 4}},
        },
    }  # fmt: skip


def test_a_branch_of_a_live_job_becomes_a_job_of_its_own(
    tmp_path: Path, tiny_dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output, directory = tmp_path / "job.toml", tmp_path / "out", tmp_path / "other"
    file.write_text(tomli_w.dumps(settings(output)))
    job = RunningJob(file, output)
    other = None
    try:
        job.wait_for("a kept step", (output / "trainer" / "old" / "checkpoints" / "step_4" / "STABLE").exists)
        asked = ["branch", "old", "--step", "3", "--as", "new", "training.learning_rate=1e-5", "--into", str(directory)]
        assert main([*asked, "--job", str(output)]) == 0
        said = capsys.readouterr().out
        command = shlex.split(said.partition("to start it: ")[2])
        assert command[:2] == ["counterpoint", "run"], said
        other = RunningJob(Path(command[2]), directory, tuple(command[3:]))
        assert other.wait() == 0, other.output()
        assert steps_of(directory / "run_new" / "metrics.jsonl") == [*range(1, STEPS + 1)]
        origin = origin_of(directory / "run_new")
        assert origin is not None
        assert (origin.job, origin.run, origin.step) == (str(output), "old", 3)
        trained = [line for _, line in read_lines(directory / "trainer" / "metrics.jsonl")]
        assert [(line["run_id"], line["step"]) for line in trained] == [("new", step) for step in range(1, STEPS + 1)]
        assert [line["learning_rate"] for line in trained] == [1e-4] * 3 + [1e-5] * (STEPS - 3)
        assert job.wait() == 0, job.output()
        assert main(["verify", str(directory)]) == 0, capsys.readouterr()
    finally:
        job.end()
        if other is not None:
            other.end()
