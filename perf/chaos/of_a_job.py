"""Kills processes of a real job with several runs by SIGKILL at random, round after round, and audits its directory.

A round kills a process at a random moment: an orchestrator's, the trainer's, or one of vLLM's. In some a second one follows
within seconds, while the first is being started again. The round ends once every killed process is back and every run has
committed and trained two more steps. In the end the job is stopped in order, resumed to the end of its runs, and audited
(`perf/chaos/audit.py`): every step trained exactly once, nothing lost, nothing shipped twice.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from perf.chaos.audit import FAULTS, Findings, audit
from perf.chaos.disk import json_lines
from perf.chaos.job import ChaosJob, Victim
from perf.chaos.progress import ChaosError, say
from perf.figures import Case, Figure

SECOND_KILL = 0.4
"""The share of rounds with a second kill."""
SECOND_WITHIN_SECONDS = 20.0
"""The latest second kill: a killed trainer has just begun to train again, and a killed vLLM is being loaded."""
MOMENT_SECONDS = 4.0
"""The longest pause between a round and the next kill: several steps."""
STEPS_A_ROUND = 2

ROLES = ("orchestrator", "trainer", "inference")


@dataclass
class Toll:
    """The kills of a job, and how long it took to recover."""

    kills: Counter[str] = field(default_factory=Counter)
    """The number of kills, by process."""
    slowest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ROLES, 0.0))
    """The longest time from a kill to the end of its round, in seconds, by the role killed first."""
    in_flight: int = 0
    """Rollouts in flight when an orchestrator was killed, by its last metrics line."""
    restarts: int = 0
    """Restarts of workers. A worker of which two processes were killed at once is restarted once."""

    def case(self, rounds: int, findings: Findings) -> Case:
        """Returns the figures."""
        figures = [Figure("rounds", rounds, "")]
        figures += [Figure(f"{process}: killed", count, "") for process, count in sorted(self.kills.items())]
        figures += [Figure("workers started again", self.restarts, "")]
        figures += [Figure(name, count, "") for name, count in findings.counts.items()]
        figures += [Figure("rollouts in flight when their orchestrator was killed", self.in_flight, "")]
        figures += [
            Figure(f"{role}: longest until every run went on", seconds, "s")
            for role, seconds in self.slowest.items()
            if seconds
        ]
        figures += [Figure(fault, len(findings.faults[fault]), "", 0) for fault in FAULTS]
        return Case("chaos", figures)


def chaos(job: ChaosJob, rounds: int, chance: random.Random) -> Toll:
    """Starts the job, kills its processes for so many rounds, and ends it in order. Raises `ChaosError` when it stands still."""
    toll = Toll()
    job.start()
    job.wait_for_steps(STEPS_A_ROUND)
    for number in range(1, rounds + 1):
        say(f"round {number} of {rounds}")
        _round(job, chance, toll)
    toll.restarts = sum(worker["restarts"] for worker in job.workers().values())
    say("the job is stopped in order, and resumed to the end of its runs")
    job.finish()
    return toll


def _round(job: ChaosJob, chance: random.Random, toll: Toll) -> None:
    job.wait(chance.uniform(0.0, MOMENT_SECONDS))
    began = time.monotonic()
    before = {name: worker["restarts"] for name, worker in job.workers().items()}
    victims = [_kill(job, chance, toll)]
    if chance.random() < SECOND_KILL:
        job.wait(chance.uniform(0.0, SECOND_WITHIN_SECONDS))
        victims.append(_kill(job, chance, toll))
    job.wait_until("return of what was killed", lambda: _all_are_back(job, victims, before))
    job.wait_for_steps(STEPS_A_ROUND)
    took = time.monotonic() - began
    toll.slowest[victims[0].role] = max(toll.slowest[victims[0].role], took)
    say(f"  every run has gone on after {took:.0f} s: {job.witness.committed}")


def _kill(job: ChaosJob, chance: random.Random, toll: Toll) -> Victim:
    victim = job.kill(chance)
    toll.kills[victim.process] += 1
    say(f"  killed the {victim.process} of {victim.worker}, process {victim.pid}")
    if victim.role == "orchestrator":
        run = job.output_dir / f"run_{victim.worker.removeprefix('orchestrator_')}"
        toll.in_flight += sum(line["inflight/rollouts"] for line in json_lines(run / "metrics.jsonl")[-1:])
    return victim


def _all_are_back(job: ChaosJob, victims: list[Victim], before: dict[str, int]) -> bool:
    """Returns whether every worker of a victim has been restarted since, and all workers are ready."""
    workers = job.workers()
    again = all(workers[victim.worker]["restarts"] > before[victim.worker] for victim in victims)
    return again and all(worker["state"] == "ready" for worker in workers.values())


def measure(given: argparse.Namespace) -> Case:
    """Runs the chaos; the job's directory stays with `--keep`, and where a bound is broken, which is then named."""
    directory = given.keep or Path(tempfile.mkdtemp(prefix="counterpoint-chaos-"))
    if directory.exists() and any(directory.iterdir()):
        raise ChaosError(f"--keep {directory}: the directory is not empty")
    directory.mkdir(parents=True, exist_ok=True)
    job = ChaosJob(directory.absolute())
    try:
        toll = chaos(job, given.rounds, random.Random(given.seed))
        findings = audit(job.output_dir, job.notes)
    except ChaosError as error:
        raise ChaosError(f"{error}\nits files are in {directory}") from None
    finally:
        job.close()
    case = toll.case(given.rounds, findings)
    for fault, cases in findings.faults.items():
        for words in cases:
            say(f"{fault}: {words}")
    if not case.held:
        say(f"its files are in {directory}")
    elif given.keep is None:
        shutil.rmtree(directory)
    return case
