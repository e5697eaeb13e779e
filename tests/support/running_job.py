"""A small real job, `counterpoint run` in a process of its own: vLLM, trainer and orchestrator on a tiny mixture of experts."""

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

from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.support.ports import free_port
from tests.support.vllm_server import ServerProcess

STEPS = 8


def settings(
    output_dir: Path, max_restarts: int = 0, server: ServerProcess | None = None, steps: int = STEPS
) -> dict[str, Any]:
    """The configuration of a job with few short steps, and a checkpoint of the trainer only at every third. A worker's death ends
    the job unless it may restart workers. The job starts a vLLM server of its own unless it is given one."""
    if server is not None:
        job = settings(output_dir, max_restarts, steps=steps)
        inference = {"replicas": 0, "max_model_len": server.config.max_model_len}
        orchestrator = job["orchestrator"] | {"inference": {"urls": [server.url]}}
        return job | {"model": server.config.model, "inference": inference, "orchestrator": orchestrator}
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
            "steps": steps,
            "environments": [{"name": "reverse", "kind": "reverse-text"}],
            "sampling": {"max_tokens": 16},
            "schedule": {"group_size": 4, "rollouts_per_step": 16, "max_inflight_rollouts": 32},
            "filters": [],
            "training": {"learning_rate": 1e-4, "checkpoint_interval": 3},
        },
    }


@dataclass
class RunningJob:
    """A running `counterpoint run`, marked so that a process that it leaves behind can be found."""

    config_file: Path
    output_dir: Path
    arguments: tuple[str, ...] = ()
    command: str = "run"
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _sessions: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.log = self.config_file.with_name(f"run_{self.mark}.txt")
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "counterpoint.cli.main", self.command, str(self.config_file), *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"MARK_OF_TEST": self.mark},
                start_new_session=True,
            )

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Waits until `condition()` holds. Fails, with the job's output, when the job ends before or it takes too long."""

        def holds() -> bool:
            if condition():
                return True
            ended = self.process.poll()
            assert ended is None, f"the job ended with {ended} while the test waited for {what}:\n{self.output()}"
            return False

        wait_until(holds, what, DEADLINE_SECONDS, self.output)

    def wait(self) -> int:
        """Waits for the job's end and returns its exit code."""
        try:
            return self.process.wait(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {DEADLINE_SECONDS} s:\n{self.output()}") from None

    def output(self) -> str:
        """Returns the job's output so far."""
        return self.log.read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        """Returns the command line of every process of the job, by process id. Zombies are left out. A process belongs to the job
        if it has its mark, or is in a session with one that has (vLLM's engine overwrites its environment, mark included)."""
        found: dict[int, tuple[int, str]] = {}
        self._sessions.add(self.process.pid)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
                marked = f"MARK_OF_TEST={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has just ended
            if command:
                found[int(entry.name)] = (session, command)
                self._sessions |= {session} if marked else set()
        return {pid: command for pid, (session, command) in found.items() if session in self._sessions}

    def pid_of(self, words: str) -> int:
        """Returns the id of the one process, other than a guardian, whose command line has `words`."""
        pids = [
            pid
            for pid, command in self.processes().items()
            if words in command and "transport/process/launch.py" not in command
        ]
        assert len(pids) == 1, f"processes with {words!r}: {pids} of {self.processes()}"
        return pids[0]

    def end(self) -> None:
        """Kills what still runs, as it does after a failed test."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def assert_nothing_is_left(job: RunningJob) -> None:
    """Asserts that a job that has ended has left no process. The kernel takes a moment to remove those that were killed."""
    wait_until(lambda: not job.processes(), "the end of its processes", details=lambda: str(job.processes()))


def write_config(
    directory: Path,
    max_restarts: int = 0,
    server: ServerProcess | None = None,
    steps: int = STEPS,
    sends_weights: bool = False,
) -> Path:
    """Writes the job's file to `directory`; its output goes beside it. With `sends_weights` they are sent to
    the server, which otherwise reads files."""
    file, job = directory / "job.toml", settings(directory / "output", max_restarts, server, steps)
    if sends_weights:
        job["orchestrator"]["inference"]["send_weights"] = True
    file.write_text(tomli_w.dumps(job))
    return file


def steps_of(metrics_file: Path) -> list[int]:
    """Returns the steps of a metrics file in its order, without a last line that is still being written."""
    if not metrics_file.exists():
        return []
    whole, _, _ = metrics_file.read_text().rpartition("\n")
    return [json.loads(line)["step"] for line in whole.splitlines()]
