"""Kills processes of a real job with several runs by SIGKILL at random, round after round, and audits its directory.

A round kills a process at a random moment: an orchestrator's, the trainer's, or one of vLLM's. In some a second one follows
within seconds, while the first is being started again. The round ends once every killed process is back and every run has
committed and trained two more steps. In the end the job is stopped in order, resumed to the end of its runs, and audited
(`perf/chaos/audit.py`): every step trained exactly once, nothing lost, nothing shipped twice.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from perf.chaos.audit import FAULTS, audit
from perf.chaos.disk import json_lines
from perf.chaos.job import ChaosJob, Victim
from perf.chaos.report import Findings, Report, say
from perf.figures import Case

SECOND_KILL = 0.4
"""The share of rounds with a second kill."""
SECOND_WITHIN_SECONDS = 20.0
"""The latest second kill: a killed trainer has just begun to train again, and a killed vLLM is being loaded."""
MOMENT_SECONDS = 4.0
"""The longest pause between a round and the next kill: several steps."""
STEPS_A_ROUND = 2


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
        report.add(audit(job.output_dir, job.notes), directory)
    return report.case()
