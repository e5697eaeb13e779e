"""The job that chaos befalls: `counterpoint run` with several runs, one trainer and one vLLM server, on the tiny dense model.

Everything in it is real and small: steps of a second, so that many fit between two kills, and a checkpoint of the trainer only at
every third, so that a killed one has something to train again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from cluster.launch import descendants
from cluster.process import guarded, last_lines
from perf.chaos.witness import Witness

LOOK_SECONDS = 0.1
"""Between two looks of the witness; a step takes several times as long."""

DEADLINE_SECONDS = 900.0
"""For anything that is waited for. A restart of vLLM takes a minute, and up to half of one until it begins."""

MANY = 1_000_000
"""Steps, and restarts in a row, of which there are always enough left."""


class ChaosError(RuntimeError):
    """The job ended, or did not go on; the message says what was awaited and quotes its output."""


def settings(output_dir: Path) -> dict[str, Any]:
    """The job's file: two tasks, one of them of several turns, and different rates, ranks and optimizers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    guess = [{"name": "guess", "kind": "guess-number"}]
    return {
        "output_dir": str(output_dir),
        "model": "tiny-dense",
        "max_restarts": MANY,
        "inference": {"port": port, "dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 4096},
        "trainer": {"device": "cpu", "max_tokens": 4096, "threads": 1},
        "orchestrator": {
            "steps": MANY,
            "sampling": {"max_tokens": 16},
            "schedule": {"group_size": 4, "rollouts_per_step": 16, "max_inflight_rollouts": 24},
            "filters": [],
            "training": {"learning_rate": 1e-4, "checkpoint_interval": 3, "lora": {"rank": 8}},
            "environments": [{"name": "reverse", "kind": "reverse-text"}],
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
    """As `processes.json` names it."""
    process: str
    """Which of the worker's: its own, or one that it started."""
    pid: int

    @property
    def role(self) -> str:
        """`orchestrator`, `trainer` or `inference`."""
        return self.worker.partition("_")[0]


class ChaosJob:
    """The command, under a guardian of ours, and the witness beside it, who looks while anything is waited for."""

    def __init__(self, directory: Path) -> None:
        self.output_dir = directory / "job"
        self.notes = directory / "witness"
        self.witness = Witness(self.output_dir, self.notes)
        self._file = directory / "job.toml"
        self._log = directory / "job.log"
        self._settings = settings(self.output_dir)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def run_ids(self) -> list[str]:
        """Of its runs."""
        return [run["run_id"] for run in self._settings["runs"]]

    def start(self, *arguments: str) -> None:
        """Starts the command; does not wait."""
        self._file.write_text(tomli_w.dumps(self._settings))
        command = [sys.executable, "-P", "-m", "cli.main", "run", str(self._file), *arguments]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                guarded(command), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def finish(self) -> None:
        """Stops the command in order, has it train what is committed and two steps of each run more, and waits for its end."""
        self._end(signal.SIGTERM)
        self.witness.look()
        for run in self._settings["runs"]:
            run["steps"] = self.witness.committed[run["run_id"]] + 2
        self.start("--resume")
        self._end(None)

    def _end(self, number: signal.Signals | None) -> None:
        process = self._alive()
        if number is not None:
            process.send_signal(number)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise ChaosError(f"the job did not end within {DEADLINE_SECONDS:g} s\n{self._quoted()}")
            self.witness.look()
            time.sleep(LOOK_SECONDS)
        self._process = None
        if process.returncode not in ((0,) if number is None else (0, 128 + number)):
            raise ChaosError(f"the job ended with {process.returncode}, in order as it was\n{self._quoted()}")
        self.witness.look()

    def close(self) -> None:
        """For a job that failed: its guardian ends it and everything below it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)
            self._process.wait()

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Until `condition`. Raises `ChaosError` when the job ends before, or it takes too long."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            self.witness.look()
            if condition():
                return
            if (code := self._alive().poll()) is not None:
                raise ChaosError(f"the job ended with {code} before the {what}\n{self._quoted()}")
            if failed := [name for name, worker in self.workers().items() if worker["state"] == "failed"]:
                raise ChaosError(f"{', '.join(failed)} failed for good before the {what}\n{self._quoted()}")
            if time.monotonic() > deadline:
                raise ChaosError(f"no {what} within {DEADLINE_SECONDS:g} s\n{self._quoted()}")
            time.sleep(LOOK_SECONDS)

    def wait(self, seconds: float) -> None:
        """So long, the job running."""
        until = time.monotonic() + seconds
        self.wait_until("some time to pass", lambda: time.monotonic() >= until)

    def wait_for_steps(self, count: int) -> None:
        """Until every run has committed and trained `count` steps beyond what it has now."""
        self.witness.look()
        wanted = {run_id: self._steps(run_id) + count for run_id in self.run_ids}
        self.wait_until(f"step {wanted}", lambda: all(self._steps(run_id) >= step for run_id, step in wanted.items()))

    def _steps(self, run_id: str) -> int:
        return min(self.witness.committed.get(run_id, 0), self.witness.trained.get(run_id, 0))

    def workers(self) -> dict[str, dict[str, Any]]:
        """What the job says of its workers, by name; nothing before it says something."""
        try:
            workers = json.loads((self.output_dir / "processes.json").read_bytes())["workers"]
        except FileNotFoundError:
            return {}
        return {worker["name"]: worker for worker in workers}

    def kill(self, chance: random.Random) -> Victim:
        """Kills one process: of a role that chance picks among those with a living one, and of these one by chance again."""
        victims: list[Victim] = []

        def found() -> bool:
            victims[:] = self._victims()
            return bool(victims)

        while True:
            self.wait_until("a process to kill", found)
            role = chance.choice(sorted({victim.role for victim in victims}))
            victim = chance.choice([victim for victim in victims if victim.role == role])
            try:
                os.kill(victim.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself just now
            return victim

    def _victims(self) -> list[Victim]:
        """Each role's own process, and what vLLM consists of: its API server, and the engine's core."""
        below = set(descendants(self._alive().pid))
        found: list[Victim] = []
        for name, worker in self.workers().items():
            if (pid := worker["pid"]) not in below:
                continue  # not living, or no more
            found.append(Victim(name, name.partition("_")[0], pid))
            if name.startswith("inference"):
                found += [Victim(name, what, child) for child in descendants(pid) if (what := _part_of_vllm(child))]
        return found

    def _alive(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def _quoted(self) -> str:
        return "\n".join(f"  | {line}" for line in last_lines(self._log))


def _part_of_vllm(pid: int) -> str | None:
    """What a process below vLLM's role is; None for a helper of Python's, and for one that has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if b"vllm.entrypoints" in command:
        return "API server"
    return "engine core" if b"EngineCore" in command else None
