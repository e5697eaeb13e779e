"""A small real job for the tests of this folder: vLLM, trainer and orchestrator on the tiny mixture of experts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from tests.support.polling import wait_until
from tests.support.ports import free_port

STEPS = 8
DEADLINE_SECONDS = 240.0


def settings(output_dir: Path, max_restarts: int = 0) -> dict[str, Any]:
    """The job's configuration: few short steps, and a checkpoint of the trainer only at every third. A death ends the job, unless
    it may restart what died."""
    return {
        "output_dir": str(output_dir),
        "model": "tiny-moe",
        "max_restarts": max_restarts,
        "inference": {
            "port": free_port(),
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_batched_tokens": 4096,
            "return_routed_experts": True,
        },
        "trainer": {"device": "cpu", "max_tokens": 4096},
        "orchestrator": {
            "run_id": "killed",
            "steps": STEPS,
            "environments": [{"name": "reverse", "kind": "reverse-text"}],
            "sampling": {"max_tokens": 16},
            "schedule": {"group_size": 4, "rollouts_per_step": 16, "max_inflight_rollouts": 32},
            "filters": [],
            "training": {"learning_rate": 1e-4, "checkpoint_interval": 3},
        },
    }


@dataclass
class RunningJob:
    """`counterpoint run` as a process of its own, marked so that whatever it leaves behind can be found."""

    config_file: Path
    output_dir: Path
    arguments: tuple[str, ...] = ()
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.log = self.config_file.with_name(f"run_{self.mark}.txt")
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cli.main", "run", str(self.config_file), *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"MARK_OF_TEST": self.mark},
                start_new_session=True,
            )

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Until `condition`; fails, with what the job printed, when it ends before or takes too long."""

        def holds() -> bool:
            if condition():
                return True
            ended = self.process.poll()
            assert ended is None, f"the job ended with {ended} while the test waited for {what}:\n{self.output()}"
            return False

        wait_until(holds, what, DEADLINE_SECONDS, self.output)

    def wait(self) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {DEADLINE_SECONDS} s:\n{self.output()}") from None

    def output(self) -> str:
        """What it printed so far."""
        return self.log.read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        """Pid to command line of every process of the job, zombies left out: those of its session, and those with its mark,
        should one have left the session. (vLLM's engine overwrites its environment, mark included.)"""
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
                marked = f"MARK_OF_TEST={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended while we looked
            if command and (marked or session == self.process.pid):
                found[int(entry.name)] = command
        return found

    def pid_of(self, words: str) -> int:
        """The one process whose command line has `words`, its guardian left out."""
        pids = [
            pid for pid, command in self.processes().items() if words in command and "cluster/launch.py" not in command
        ]
        assert len(pids) == 1, f"processes with {words!r}: {pids} of {self.processes()}"
        return pids[0]

    def end(self) -> None:
        """For a test that failed: leaves nothing running."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def assert_nothing_is_left(job: RunningJob) -> None:
    """Of its processes, once it has ended: the kernel takes a moment to remove those that were killed."""
    wait_until(lambda: not job.processes(), "the end of its processes", 10, lambda: str(job.processes()))


def write_config(directory: Path, max_restarts: int = 0) -> Path:
    """The job's file in `directory`, its output beside it."""
    file = directory / "job.toml"
    file.write_text(tomli_w.dumps(settings(directory / "output", max_restarts)))
    return file


def steps_of(metrics_file: Path) -> list[int]:
    """The steps of a metrics file, in its order; a last line that is still being written is left out."""
    if not metrics_file.exists():
        return []
    whole, _, _ = metrics_file.read_text().rpartition("\n")
    return [json.loads(line)["step"] for line in whole.splitlines()]
