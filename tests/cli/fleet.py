"""A job that only seems to run, for tests of `counterpoint sweep` as real processes around runs that pretend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w

from counterpoint.job.config import JobConfig
from counterpoint.job.directory import orchestrator_of
from counterpoint.sweep.status import TargetStatus, sweep_status
from counterpoint.transport.files.lock import take_lock
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.support.running_job import steps_of

ALL_STEPS = list(range(1, 21))


class Fleet:
    """A job that seems to run, and a sweep over its runs with two targets, `seed-1` and `seed-2`."""

    def __init__(self, tmp_path: Path) -> None:
        self.output, self.root, self.file = tmp_path / "out", tmp_path / "sweep", tmp_path / "sweep.toml"
        job = {
            "output_dir": str(self.output),
            "model": "some-model",
            "stay": True,
            "inference": {"max_model_len": 256},
            "trainer": {"max_tokens": 1024},
            "orchestrator": {"training": {"lora": {"rank": 4}}},
        }
        self.output.mkdir()
        (self.output / "job.json").write_text(JobConfig.model_validate(job).model_dump_json())
        self.lock = take_lock(self.output / "job.lock", "")
        self.settings: dict[str, Any] = {
            "name": "test",
            "root": str(self.root),
            "join": str(self.output),
            "heartbeat_seconds": 1.0,
            "lease_seconds": 60.0,
            "grid": {"seed": [1, 2]},
            "base": {
                "steps": 20,
                "environments": [{"name": "reverse", "kind": "reverse-text"}],
                "sampling": {"max_tokens": 32},
                "training": {"lora": {"rank": 4}},
            },
        }
        self.outputs: dict[subprocess.Popen[bytes], Path] = {}

    def write(self) -> str:
        self.file.write_text(tomli_w.dumps(self.settings))
        return str(self.file)

    def worker(self, behaviour: str, *switches: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.cli.fake_sweep", behaviour, self.write(), *(switches or ("--worker",))]
        output = self.file.with_name(f"worker_{len(self.outputs)}.log")
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}  # roles do not look where they stand
        with open(output, "wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                cwd=self.file.parent,
            )
        self.outputs[process] = output
        return process

    def finish(self, worker: subprocess.Popen[bytes]) -> tuple[int, str]:
        return worker.wait(DEADLINE_SECONDS), self.outputs[worker].read_text()

    def status(self, target_id: str) -> TargetStatus:
        found = {
            status.target_id: status for status in sweep_status(f"{self.root}/{self.settings['name']}", [target_id])
        }
        return found[target_id]

    def steps(self, target_id: str) -> list[int]:
        return steps_of(self.output / f"run_{self.settings['name']}.{target_id}" / "metrics.jsonl")

    def is_at_work(self, target_id: str) -> bool:
        return orchestrator_of(self.output, f"{self.settings['name']}.{target_id}") is not None

    def wait_for_step_3(self, target_id: str) -> None:
        wait_until(lambda: self.steps(target_id) == [1, 2, 3], f"{target_id} to hang")

    def let_go(self, target_id: str) -> None:
        """Ends the waiting of a target whose behaviour is `wait`, before or after it began."""
        control = self.output / f"run_{self.settings['name']}.{target_id}" / "control"
        control.mkdir(parents=True, exist_ok=True)
        (control / "go").touch()
