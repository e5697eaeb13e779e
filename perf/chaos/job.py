"""The job whose processes are killed: `counterpoint run` with several runs, a trainer and a vLLM server, on a tiny dense model.

Everything in it is real and small: steps of a second, so that many fit between two kills, and a checkpoint of the trainer only at
every third step, so that a killed trainer has steps to train again.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from counterpoint.job.evaluation.server import free_port
from counterpoint.transport.process.child import Child, last_lines
from counterpoint.transport.process.launch import descendants
from perf.chaos import batch_copies
from perf.chaos.report import ChaosError, kill
from perf.chaos.witness import Witness

LOOK_SECONDS = 0.1
"""Seconds between two reads by the witness; a step takes several times as long."""

DEADLINE_SECONDS = 900.0
"""Deadline of each wait. A restart of vLLM takes a minute, and begins after up to half a minute."""

MANY = 1_000_000
"""Steps, and restarts in a row: no limit."""


def settings(output_dir: Path, notes: Path) -> dict[str, Any]:
    """Returns the job's configuration: two tasks, one of several turns, and different learning rates, ranks and intervals.

    Its orchestrators keep what they delete in the witness's `notes`.
    """
    port = free_port("127.0.0.1", 0)
    module, keep = batch_copies.__name__, {"notes": str(notes)}
    guess = [{"name": "guess", "kind": f"{module}:KeptGuessNumber", "args": keep}]
    reverse = [{"name": "reverse", "kind": f"{module}:KeptReverseText", "args": keep}]
    return {
        "output_dir": str(output_dir),
        "model": "tiny-dense",
        "max_restarts": MANY,
        "inference": {
            "port": port,
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_batched_tokens": 4096,
            "startup_timeout_seconds": DEADLINE_SECONDS,
        },
        "trainer": {"device": "cpu", "max_tokens": 4096, "threads": 1},
        "orchestrator": {
            "steps": MANY,
            "sampling": {"max_tokens": 16},
            "schedule": {"group_size": 4, "rollouts_per_step": 16, "max_inflight_rollouts": 24},
            "filters": [],
            "training": {"learning_rate": 1e-4, "checkpoint_interval": 3, "lora": {"rank": 8}},
            "environments": reverse,
        },
        "runs": [
            {"run_id": "first"},
            {"run_id": "second", "training": {"learning_rate": 1e-3, "checkpoint_interval": 2}},
            {"run_id": "third", "environments": guess, "training": {"lora": {"rank": 4}}},
        ],
    }


@dataclass(frozen=True, slots=True)
class Victim:
    """A process of the job."""

    worker: str
    """Its name in `processes.json`."""
    process: str
    """The role for the worker's own process, else the part of vLLM that it started."""
    pid: int

    @property
    def role(self) -> str:
        """`orchestrator`, `trainer` or `inference`."""
        return self.worker.partition("_")[0]


class ChaosJob:
    """The command, under a guardian of ours, and the witness, which reads during every wait."""

    def __init__(self, directory: Path) -> None:
        self.output_dir = directory / "job"
        self.notes = directory / "witness"
        self.witness = Witness(self.output_dir, self.notes)
        self._file = directory / "job.toml"
        self._log = directory / "job.log"
        self._settings = settings(self.output_dir, self.notes)
        self._process: Child | None = None

    @property
    def run_ids(self) -> list[str]:
        """The ids of its runs."""
        return [run["run_id"] for run in self._settings["runs"]]

    def start(self, *arguments: str) -> None:
        """Starts the command; does not wait."""
        self._file.write_text(tomli_w.dumps(self._settings))
        command = [sys.executable, "-P", "-m", "counterpoint.cli.main", "run", str(self._file), *arguments]
        self._process = Child("the job", command, log=self._log)

    def finish(self) -> None:
        """Stops the command in order, and resumes it until each run has trained what it committed and two steps more."""
        self._end(signal.SIGTERM)
        self.witness.look()
        for run in self._settings["runs"]:
            run["steps"] = self.witness.committed[run["run_id"]] + 2
        self.start("--resume")
        self._end(None)

    def _end(self, number: signal.Signals | None) -> None:
        process = self._alive()
        if number is not None:
            process.signal(number)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (code := process.code) is None:
            if time.monotonic() > deadline:
                raise ChaosError(f"the job did not end within {DEADLINE_SECONDS:g} s\n{self._quoted()}")
            self.witness.look()
            time.sleep(LOOK_SECONDS)
        self._process = None
        if code not in ((0,) if number is None else (0, 128 + number)):
            raise ChaosError(f"the job was to end in order, and ended with {code}\n{self._quoted()}")
        self.witness.look()

    def close(self) -> None:
        """Ends a job that failed, with every process below it."""
        if self._process is not None:
            self._process.kill()

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Waits until `condition()` holds. Raises `ChaosError` when the job ends before, or it takes too long."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            self.witness.look()
            if condition():
                return
            if (code := self._alive().code) is not None:
                raise ChaosError(f"the job ended with {code} before the {what}\n{self._quoted()}")
            if failed := [name for name, worker in self.workers().items() if worker["state"] == "failed"]:
                raise ChaosError(f"{', '.join(failed)} failed for good before the {what}\n{self._quoted()}")
            if time.monotonic() > deadline:
                raise ChaosError(f"no {what} within {DEADLINE_SECONDS:g} s\n{self._quoted()}")
            time.sleep(LOOK_SECONDS)

    def wait(self, seconds: float) -> None:
        """Waits so long while the job runs."""
        until = time.monotonic() + seconds
        self.wait_until("some time to pass", lambda: time.monotonic() >= until)

    def wait_for_steps(self, count: int) -> None:
        """Waits until every run has committed and trained `count` more steps."""
        self.witness.look()
        wanted = {run_id: self._steps(run_id) + count for run_id in self.run_ids}
        self.wait_until(f"step {wanted}", lambda: all(self._steps(run_id) >= step for run_id, step in wanted.items()))

    def _steps(self, run_id: str) -> int:
        return min(self.witness.committed.get(run_id, 0), self.witness.trained.get(run_id, 0))

    def workers(self) -> dict[str, dict[str, Any]]:
        """Returns the workers of `processes.json` by name; none before there is such a file."""
        try:
            workers = json.loads((self.output_dir / "processes.json").read_bytes())["workers"]
        except FileNotFoundError:
            return {}
        return {worker["name"]: worker for worker in workers}

    def kill(self, chance: random.Random) -> Victim:
        """Kills one process at random: of the roles with a living process one, and one of its processes."""
        victims: list[Victim] = []

        def found() -> bool:
            victims[:] = self._victims()
            return bool(victims)

        while True:
            self.wait_until("a process to kill", found)
            role = chance.choice(sorted({victim.role for victim in victims}))
            victim = chance.choice([victim for victim in victims if victim.role == role])
            if kill(victim.pid):
                return victim

    def _victims(self) -> list[Victim]:
        """Returns each worker's own process, and those of vLLM: its API server and the engine's core."""
        below = set(descendants(self._alive().pid))
        found: list[Victim] = []
        for name, worker in self.workers().items():
            if (pid := worker["pid"]) not in below:
                continue  # it does not live
            found.append(Victim(name, name.partition("_")[0], pid))
            if name.startswith("inference"):
                found += [Victim(name, what, child) for child in descendants(pid) if (what := _part_of_vllm(child))]
        return found

    def _alive(self) -> Child:
        assert self._process is not None
        return self._process

    def _quoted(self) -> str:
        return "\n".join(f"  | {line}" for line in last_lines(self._log))


def _part_of_vllm(pid: int) -> str | None:
    """Names a process below vLLM's worker; None for a helper of Python's, and for one that has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if b"counterpoint.inference.plugin.program" in command and b"launch.py" not in command:
        return "API server"
    return "engine core" if b"EngineCore" in command else None
