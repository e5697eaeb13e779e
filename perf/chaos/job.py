"""Kills processes of a real job with several runs by SIGKILL at random, round after round, and audits its directory.

A round kills a process at a random moment: an orchestrator's, the trainer's, or one of vLLM's. In some a second one follows
within seconds, while the first is being started again. The round ends once every killed process is back and every run has
committed and trained two more steps. In the end the job is stopped in order, resumed to the end of its runs, and audited
(`perf/chaos/audit.py`): every step trained exactly once, nothing lost, nothing shipped twice.

The job is `counterpoint run` with a trainer and a vLLM server, on a tiny dense model. Everything in it is real and small: steps
of a second, so that many fit between two kills, and a checkpoint of the trainer only at every third step, so that a killed
trainer has steps to train again.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from counterpoint.job.evaluation.server import free_port
from counterpoint.job.processes_file import read_workers
from counterpoint.transport.process.launch import descendants
from perf.chaos import batch_copies
from perf.chaos.audit import FAULTS, audit, verify_runs
from perf.chaos.disk import json_lines
from perf.chaos.report import Findings, Report, kill, say
from perf.chaos.witness import Witness
from perf.commands import PATIENCE_SECONDS, Command, PerfError, until
from perf.figures import Case

MANY = 1_000_000
"""Steps, and restarts in a row: no limit."""

SECOND_KILL = 0.4
"""The share of rounds with a second kill."""
SECOND_WITHIN_SECONDS = 20.0
"""The latest second kill: a killed trainer has just begun to train again, and a killed vLLM is being loaded."""
MOMENT_SECONDS = 4.0
"""The longest pause between a round and the next kill: several steps."""
STEPS_A_ROUND = 2


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
            "startup_timeout_seconds": PATIENCE_SECONDS,
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
    """The command, under a guardian of ours, and the witness, which reads during every wait. Leaving the block ends both."""

    def __init__(self, directory: Path) -> None:
        self.output_dir = directory / "job"
        self.notes = directory / "witness"
        self.witness = Witness(self.output_dir, self.notes)
        self._file = directory / "job.toml"
        self._settings = settings(self.output_dir, self.notes)
        self._command = self._started()

    def __enter__(self) -> ChaosJob:
        return self

    def __exit__(self, *error: object) -> None:
        self._command.stop()

    def _started(self, *arguments: str) -> Command:
        self._file.write_text(tomli_w.dumps(self._settings))
        return Command(self._file.with_name("job.log"), "run", str(self._file), *arguments)

    def finish(self) -> None:
        """Stops the command in order, and resumes it until each run has trained what it committed and two steps more."""
        self._command.stop()
        self._require_code(0, 143)
        self.witness.look()
        for run in self._settings["runs"]:
            run["steps"] = self.witness.committed[run["run_id"]] + 2
        self._command = self._started("--resume")
        until("the end of the job", lambda: self._command.ended, meanwhile=self.witness.look)
        self._require_code(0)
        self.witness.look()

    def _require_code(self, *codes: int) -> None:
        if (code := self._command.code) not in codes:
            raise PerfError(f"the job was to end in order, and ended with {code}{self._command.last_output()}")

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Waits until `condition()` holds. Raises `PerfError` when the job ends before, or it takes too long."""
        until(what, condition, [self._command], self.witness.look)

    def wait(self, seconds: float) -> None:
        """Waits so long while the job runs."""
        end = time.monotonic() + seconds
        self.wait_until("some time to pass", lambda: time.monotonic() >= end)

    def wait_for_steps(self, count: int) -> None:
        """Waits until every run has committed and trained `count` more steps."""
        self.witness.look()
        run_ids = [run["run_id"] for run in self._settings["runs"]]
        wanted = {run_id: self._steps(run_id) + count for run_id in run_ids}
        self.wait_until(f"step {wanted}", lambda: all(self._steps(run_id) >= step for run_id, step in wanted.items()))

    def _steps(self, run_id: str) -> int:
        return min(self.witness.committed.get(run_id, 0), self.witness.trained.get(run_id, 0))

    def workers(self) -> dict[str, dict[str, Any]]:
        """Returns the workers of the job by name; none before they are known."""
        return {worker["name"]: worker for worker in read_workers(self.output_dir)}

    def kill(self, chance: random.Random) -> Victim:
        """Kills one process at random: of the roles with a living process one, and one of its processes."""
        while True:
            self.wait_until("a process to kill", lambda: bool(self._victims()))
            if not (victims := self._victims()):
                continue  # they have just ended
            role = chance.choice(sorted({victim.role for victim in victims}))
            victim = chance.choice([victim for victim in victims if victim.role == role])
            if kill(victim.pid):
                return victim

    def _victims(self) -> list[Victim]:
        """Returns each worker's own process, and those of vLLM: its API server and the engine's core."""
        below = set(descendants(self._command.pid))
        found: list[Victim] = []
        for name, worker in self.workers().items():
            if (pid := worker["pid"]) not in below:
                continue  # it does not live
            found.append(Victim(name, name.partition("_")[0], pid))
            if name.startswith("inference"):
                found += [Victim(name, what, child) for child in descendants(pid) if (what := part_of_vllm(child))]
        return found


def part_of_vllm(pid: int) -> str | None:
    """Names a process below vLLM's worker; None for a helper of Python's, and for one that has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if b"counterpoint.inference.plugin.program" in command and b"launch.py" not in command:
        return "API server"
    return "engine core" if b"EngineCore" in command else None


def chaos(job: ChaosJob, rounds: int, chance: random.Random, report: Report) -> None:
    """Kills the job's processes for so many rounds, and ends it in order. Raises `PerfError` when it stands still."""
    job.wait_for_steps(STEPS_A_ROUND)
    for number in range(1, rounds + 1):
        say(f"round {number} of {rounds}")
        _round(job, chance, report)
        report.rounds = number
    report.findings.counts["workers started again"] = sum(worker["restarts"] for worker in job.workers().values())
    say("the job is stopped in order, and resumed to the end of its runs")
    job.finish()


def _round(job: ChaosJob, chance: random.Random, report: Report) -> None:
    job.wait(chance.uniform(0.0, MOMENT_SECONDS))
    began = time.monotonic()
    before = {name: worker["restarts"] for name, worker in job.workers().items()}
    victims = [_kill(job, chance, report)]
    if chance.random() < SECOND_KILL:
        job.wait(chance.uniform(0.0, SECOND_WITHIN_SECONDS))
        victims.append(_kill(job, chance, report))
    job.wait_until("return of what was killed", lambda: _all_are_back(job, victims, before))
    job.wait_for_steps(STEPS_A_ROUND)
    took = time.monotonic() - began
    report.took(victims[0].role, took)
    say(f"  every run has gone on after {took:.0f} s: {job.witness.committed}")


def _kill(job: ChaosJob, chance: random.Random, report: Report) -> Victim:
    victim = job.kill(chance)
    report.done[f"{victim.process}: killed"] += 1
    say(f"  killed the {victim.process} of {victim.worker}, process {victim.pid}")
    if victim.role == "orchestrator":
        run = job.output_dir / f"run_{victim.worker.removeprefix('orchestrator_')}"
        in_flight = sum(line["inflight/rollouts"] for line in json_lines(run / "metrics.jsonl")[-1:])
        report.findings.counts["rollouts in flight when their orchestrator was killed"] += in_flight
    return victim


def _all_are_back(job: ChaosJob, victims: list[Victim], before: dict[str, int]) -> bool:
    """Returns whether every worker of a victim has been restarted since, and all workers are ready."""
    workers = job.workers()
    again = all(workers[victim.worker]["restarts"] > before[victim.worker] for victim in victims)
    return again and all(worker["state"] == "ready" for worker in workers.values())


def measure(given: argparse.Namespace, directory: Path) -> Case:
    """Runs the chaos in a directory."""
    report = Report("chaos", Findings(FAULTS), "longest until every run went on")
    with ChaosJob(directory) as job:
        chaos(job, given.rounds, random.Random(given.seed), report)
        found = audit(job.output_dir, job.notes)
        verify_runs(job.output_dir, found)
        report.add(found, directory)
    return report.case()
