"""Chaos: kills and stops the processes of real jobs of the controller, round after round, and audits what each job left.

    counterpoint bench cluster-chaos [--rounds 100] [--backend local|ray] [--seed 1] [--fault NAME...] [--json]

A round is one fault at a random moment: SIGKILL or SIGSTOP (and SIGCONT later) of the master, its standby, an agent or a
worker of any role; a node with all its processes; a node or all masters that cannot be reached for longer than the lease; a
full disk under the journal. In some a worker or the master is killed beside it. A round ends once every worker has shown life
again and records are committed. Several rounds are done to one job; then it is let to its end, often with one more kill
meanwhile, and audited (`perf/chaos/cluster/audit.py`). No network is cut: the sockets of the local backend are files, so a node
that cannot be reached is one whose agent is stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from perf.chaos.cluster.audit import FAULTS, LOST_JOBS, Findings
from perf.chaos.cluster.job import LEASE_SECONDS, NODES, WORKERS, ClusterJob, StandsStillError, new_place
from perf.figures import Case, Figure

ROUNDS_OF_A_JOB = 6
MOMENT_SECONDS = 2.0
"""The longest pause between a round and the next fault."""
SHORT_STOP, LONG_STOP = (0.5, 2.0), (6.0, 14.0)
"""Seconds between SIGSTOP and SIGCONT: within every limit of the job, and beyond each."""
DISK_SECONDS = (1.0, 5.0)
SECOND_SHARE = 0.3
"""The share of rounds with a second kill."""
PIPE_WIDTH = 110

TARGETS = ("master", "standby", *(f"agent-{rank}" for rank in range(NODES)), *WORKERS)
LOCAL_FAULTS = ("lose node-0", "lose node-1", "cut agent-0", "cut agent-1", "cut masters", "fill disk")


@dataclass
class Toll:
    """What was done, and what was found."""

    done: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)
    """The longest time from a fault until all live again, in seconds."""
    findings: Findings = field(default_factory=Findings)
    skipped: set[str] = field(default_factory=set)
    kept: list[Path] = field(default_factory=list)

    def case(self) -> Case:
        """Returns the figures."""
        figures = [Figure("rounds", self.done.total() - self.done["second kill"], "")]
        figures += [Figure(name, count, "") for name, count in sorted(self.done.items())]
        figures += [Figure(name, count, "") for name, count in self.findings.counts.items()]
        figures += [
            Figure(f"{kind}: longest until all live", seconds, "s") for kind, seconds in sorted(self.slowest.items())
        ]
        figures += [Figure(fault, len(self.findings.faults[fault]), "", 0, timed=False) for fault in FAULTS]
        return Case("cluster-chaos", figures)


def every_fault(backend: str) -> list[str]:
    """Returns the names of the faults that can be done on a backend."""
    every = [f"{what} {target}" for what in ("kill", "stop") for target in TARGETS]
    if backend == "local":
        every += LOCAL_FAULTS
    else:
        every = [fault for fault in every if "agent-" not in fault]
    return every


def shuffled(names: Sequence[str], chance: random.Random) -> Iterator[str]:
    """Yields the names for ever: each of them once, in random order, and again in another."""
    while True:
        yield from chance.sample(names, len(names))


def chaos(rounds: int, backend: str, names: Sequence[str], chance: random.Random, parent: Path | None) -> Toll:
    """Does so many rounds of the faults of these names, and returns what was found."""
    toll = Toll()
    plan = itertools.islice(shuffled(names, chance), rounds)
    while batch := list(itertools.islice(plan, ROUNDS_OF_A_JOB)):
        _one_job(batch, backend, chance, toll, parent)
        say(f"{toll.done.total()} faults, {sum(map(len, toll.findings.faults.values()))} findings")
    return toll


def _one_job(batch: list[str], backend: str, chance: random.Random, toll: Toll, parent: Path | None) -> None:
    place = new_place(parent)
    job = ClusterJob(place, backend, full_disk=backend == "local")
    found = Findings()
    try:
        job.wait_for_life("the start of the job")
        for fault in batch:
            _round(job, fault, chance, toll)
        job.ask_for_the_end()
        if chance.random() < SECOND_SHARE:
            time.sleep(chance.uniform(0.0, MOMENT_SECONDS))
            _second(job, chance, toll)
        found = job.finish()
    except StandsStillError as error:
        found.faults[LOST_JOBS].append(str(error))
    finally:
        job.resume()
        job.close()
    toll.findings.add(found)
    if any(found.faults.values()):
        toll.kept.append(place)
        for kind, cases in found.faults.items():
            for words in cases[:20]:
                say(f"{kind}: {words}")
        say(f"the files are in {place}")
    elif parent is None:
        shutil.rmtree(place)


def _round(job: ClusterJob, fault: str, chance: random.Random, toll: Toll) -> None:
    time.sleep(chance.uniform(0.0, MOMENT_SECONDS))
    what, _, target = fault.partition(" ")
    began = time.monotonic()
    if what == "fill" and job.disk_error:
        toll.skipped.add(f"{fault}: {job.disk_error}")
        return
    if target != "disk":
        job.wait_until(f"a process of {target}", lambda: bool(job.processes(target)) or job.has_ended())
    say(f"  {fault}")
    toll.done[fault] += 1
    match what:
        case "kill" | "lose":
            if what == "lose":
                job.lose(target)
            else:
                job.send(target, signal.SIGKILL)
            if chance.random() < SECOND_SHARE:
                time.sleep(chance.uniform(0.0, MOMENT_SECONDS))
                _second(job, chance, toll)
        case "stop" | "cut":
            beyond = what == "cut" or chance.random() < 0.5
            job.pause(target)
            if chance.random() < SECOND_SHARE:
                _second(job, chance, toll)
            time.sleep(chance.uniform(*LONG_STOP) if beyond else chance.uniform(*SHORT_STOP))
            if what == "cut":
                time.sleep(LEASE_SECONDS / 2)
            job.resume()
        case "fill":
            with job.full_disk():
                _second(job, chance, toll)
                time.sleep(chance.uniform(*DISK_SECONDS))
    job.wait_for_life(f"life after {fault}")
    toll.slowest[what] = max(toll.slowest.get(what, 0.0), time.monotonic() - began)
    say(f"    all live after {time.monotonic() - began:.1f} s")


def _second(job: ClusterJob, chance: random.Random, toll: Toll) -> None:
    target = chance.choice(("master", *WORKERS))
    if job.send(target, signal.SIGKILL):
        toll.done["second kill"] += 1
        say(f"    and killed {target}")


def say(words: str) -> None:
    """Prints progress and faults to standard error."""
    print(words, file=sys.stderr, flush=True)


def main() -> int:
    """Runs the command. Returns 1 when a bound is broken; the job's directory is then kept, and named."""
    parser = argparse.ArgumentParser(
        prog="counterpoint bench cluster-chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=100, help="some ten seconds each (default: %(default)s)")
    parser.add_argument("--backend", choices=["local", "ray"], default="local", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the random faults (default: %(default)s)")
    parser.add_argument("--fault", action="append", metavar="NAME", help="only these, such as 'kill master'")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="keep the files of every job there")
    given = parser.parse_args()
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    names = every_fault(given.backend)
    if unknown := [name for name in given.fault or [] if name not in names]:
        parser.error(f"--fault {unknown[0]!r}: expected one of {', '.join(names)}")
    toll = chaos(given.rounds, given.backend, given.fault or names, random.Random(given.seed), given.keep)
    case = toll.case()
    for words in sorted(toll.skipped):
        say(f"skipped: {words}")
    if given.json:
        print(json.dumps([case.as_json()], indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(case.as_table())
    return int(not case.held)


if __name__ == "__main__":
    sys.exit(main())
