"""Chaos: kills processes of a real job with several runs by SIGKILL at random, round after round, and audits its directory.

    counterpoint bench chaos [--rounds 30] [--seed 1] [--json] [--keep DIRECTORY]

A round kills a process at a random moment: an orchestrator's, the trainer's, or one of vLLM's. In some a second one follows
within seconds, while the first is being started again. The round ends once every killed process is back and every run has
committed and trained two more steps. In the end the job is stopped in order, resumed to the end of its runs, and audited
(`perf/chaos/audit.py`): every step trained exactly once, nothing lost, nothing shipped twice.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from perf.chaos.audit import FAULTS, Findings, audit
from perf.chaos.disk import json_lines
from perf.chaos.job import ChaosError, ChaosJob, Victim
from perf.figures import Case, Figure

SECOND_KILL = 0.4
"""The share of rounds with a second kill."""
SECOND_WITHIN_SECONDS = 20.0
"""The latest second kill: a killed trainer has just begun to train again, and a killed vLLM is being loaded."""
MOMENT_SECONDS = 4.0
"""The longest pause between a round and the next kill: several steps."""
STEPS_A_ROUND = 2

PIPE_WIDTH = 110
"""The width of the table where output is no terminal."""

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


def say(words: str) -> None:
    """Prints progress and faults to standard error."""
    print(words, file=sys.stderr, flush=True)


def main() -> int:
    """Runs the command. Returns 1 when a bound is broken; the job's directory is then kept, and named."""
    parser = argparse.ArgumentParser(
        prog="counterpoint bench chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30, help="about a minute each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the random kills (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="keep the files of job and witness there")
    given = parser.parse_args()
    directory = given.keep or Path(tempfile.mkdtemp(prefix="counterpoint-chaos-"))
    if given.keep is not None:
        if directory.exists() and any(directory.iterdir()):
            parser.error(f"--keep {directory}: the directory is not empty")
        directory.mkdir(parents=True, exist_ok=True)
    job = ChaosJob(directory.absolute())
    try:
        toll = chaos(job, given.rounds, random.Random(given.seed))
        findings = audit(job.output_dir, job.notes)
    except ChaosError as error:
        print(f"counterpoint: error: bench chaos: {error}\nits files are in {directory}", file=sys.stderr)
        return 1
    finally:
        job.close()
    case = toll.case(given.rounds, findings)
    if given.json:
        print(json.dumps([case.as_json()], indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(case.as_table())
    for fault, cases in findings.faults.items():
        for words in cases:
            say(f"{fault}: {words}")
    if not case.held:
        say(f"its files are in {directory}")
    elif given.keep is None:
        shutil.rmtree(directory)
    return int(not case.held)


if __name__ == "__main__":
    sys.exit(main())
