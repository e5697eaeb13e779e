"""Kills and stops the processes of real jobs of the controller, round after round, and audits what each job left.

A fault comes at a random moment: SIGKILL or SIGSTOP (and SIGCONT later) of the master, its standby, a keeper or a worker of
any role; a node of Ray with all its processes; a node or all masters out of reach for longer than the lease; a full disk under
the state. In some a worker or the master is killed beside it. Every fault is done `--each` times at least: with few rounds,
several in a round, one after the other. A round ends once every worker has shown life again and records are committed. Several
rounds are done to one job; then it is let to its end, often with one more kill meanwhile, and audited
(`perf/chaos/cluster/audit.py`).

On the local backend no network can be cut, since its sockets are files: there a worker is cut off by stopping its keeper.
On Ray each node has a network of its own (`perf/chaos/cluster/ray_nodes.py`), whose cable is pulled for up to 40 s.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from perf.chaos.cluster.audit import FAULTS, LOST_JOBS
from perf.chaos.cluster.job import LEASE_SECONDS, ROLES, WORKERS, ClusterJob, StandsStillError
from perf.chaos.cluster.ray_nodes import NoNetworkError, RayNodes
from perf.chaos.report import Findings, Report, say
from perf.commands import PerfError
from perf.figures import Case

ROUNDS_OF_A_JOB = 6
MOMENT_SECONDS = 2.0
"""The longest pause between a round and the next fault."""
SHORT_STOP, LONG_STOP = (0.5, 2.0), (6.0, 14.0)
"""Seconds between SIGSTOP and SIGCONT: within every limit of the job, and beyond each."""
DISK_SECONDS = (1.0, 5.0)
SECOND_SHARE = 0.3
"""The share of rounds with a second kill."""

CUT_SECONDS = (10.0, 40.0)
"""How long the cable of a node of Ray is pulled: Ray gives the node up after some 20 s, the job's own leases end earlier."""

TARGETS = ("master", *ROLES)
FAULTS_OF = {
    "local": (
        "kill standby",
        "stop standby",
        "kill keeper",
        "stop keeper",
        "cut keeper",
        "cut masters",
        "fill disk",
    ),
    "ray": ("kill actor", "stop actor", "lose node", "cut node", "cut masters", "fill disk"),
}


def every_fault(backend: str) -> list[str]:
    """Returns the names of the faults that can be done on a backend."""
    return [*(f"{what} {target}" for what in ("kill", "stop") for target in TARGETS), *FAULTS_OF[backend]]


def plan_of(names: Sequence[str], rounds: int, each: int, chance: random.Random) -> list[list[str]]:
    """Returns the faults of each round: one, or as many as it takes for every fault to come `each` times.

    All of them come once, in random order, before any comes again.
    """
    a_round = max(1, math.ceil(each * len(names) / rounds))
    shuffles = math.ceil(rounds * a_round / len(names))
    faults = [name for _ in range(shuffles) for name in chance.sample(names, len(names))]
    return [faults[first * a_round : (first + 1) * a_round] for first in range(rounds)]


def chaos(plan: Sequence[list[str]], chance: random.Random, parent: Path, ray: RayNodes | None) -> Report:
    """Does the rounds of a plan, and returns what was found; the files of jobs with findings stay in `parent`."""
    report = Report("cluster-chaos", Findings(FAULTS), "longest until all live")
    for first in range(0, len(plan), ROUNDS_OF_A_JOB):
        _one_job(plan[first : first + ROUNDS_OF_A_JOB], chance, report, parent, ray)
        say(f"{report.rounds} rounds, {sum(map(len, report.findings.faults.values()))} findings")
    return report


def _one_job(
    batch: Sequence[list[str]], chance: random.Random, report: Report, parent: Path, ray: RayNodes | None
) -> None:
    place = Path(tempfile.mkdtemp(prefix="cc-", dir=parent))  # short, as the path of a socket must be
    job = ClusterJob(place, ray)
    found = Findings(FAULTS)
    try:
        job.wait_for_life("the start of the job")
        for faults in batch:
            _round(job, faults, chance, report)
        job.ask_for_the_end()
        if chance.random() < SECOND_SHARE:
            time.sleep(chance.uniform(0.0, MOMENT_SECONDS))
            _second(job, chance, report)
        found = job.finish()
    except StandsStillError as error:
        found.faults[LOST_JOBS].append(str(error))
    finally:
        job.resume()
        job.close()
    report.add(found, place)
    if found.held:
        shutil.rmtree(place)


def _round(job: ClusterJob, faults: Sequence[str], chance: random.Random, report: Report) -> None:
    began = time.monotonic()
    report.rounds += 1
    for fault in faults:
        time.sleep(chance.uniform(0.0, MOMENT_SECONDS))
        _fault(job, fault, chance, report)
    job.wait_for_life(f"life after {', '.join(faults)}")
    seconds = time.monotonic() - began
    for fault in faults:
        report.took(fault.partition(" ")[0], seconds)
    say(f"    all live after {seconds:.1f} s")


def _fault(job: ClusterJob, fault: str, chance: random.Random, report: Report) -> None:
    what, _, target = fault.partition(" ")
    if what == "fill":
        if job.disk_error:
            return say(f"  skipped: {fault}: {job.disk_error}")
    else:
        chosen = _target(job, target, chance)
        if job.has_ended():
            return
    report.done[fault] += 1
    say(f"  {fault}" if what == "fill" or chosen == target else f"  {fault}: {chosen}")
    match what:
        case "kill" | "lose":
            if what == "lose":
                job.lose(chosen)
            else:
                job.send(chosen, signal.SIGKILL)
            if chance.random() < SECOND_SHARE:
                time.sleep(chance.uniform(0.0, MOMENT_SECONDS))
                _second(job, chance, report)
        case "stop" | "cut":
            seconds = chance.uniform(*(LONG_STOP if what == "cut" or chance.random() < 0.5 else SHORT_STOP))
            if fault == "cut node":
                job.cut(chosen)
                seconds = chance.uniform(*CUT_SECONDS)
            else:
                job.pause(chosen)
            if chance.random() < SECOND_SHARE:
                _second(job, chance, report)
            time.sleep(seconds + (LEASE_SECONDS / 2 if what == "cut" else 0))
            job.resume()
        case "fill":
            with job.full_disk():
                _second(job, chance, report)
                time.sleep(chance.uniform(*DISK_SECONDS))


def _target(job: ClusterJob, target: str, chance: random.Random) -> str:
    """Waits for a process of a fault's target; returns which it is."""
    found = []

    def there() -> bool:
        chosen = job.one_of(target, chance) if target != "node" or job.nodes else ""
        if chosen and job.processes(chosen) and (target != "master" or job.ray is not None or job.processes("standby")):
            found.append(chosen)
        return bool(found) or job.has_ended()

    job.wait_until(f"a process of {target}", there)
    return found[0] if found else target


def _second(job: ClusterJob, chance: random.Random, report: Report) -> None:
    target = chance.choice(("master", *WORKERS))
    if target == "master" and not job.processes("standby"):
        return
    if job.send(target, signal.SIGKILL):
        report.done["second kill"] += 1
        say(f"    and killed {target}")


@contextmanager
def ray_nodes(backend: str) -> Iterator[RayNodes | None]:
    """Yields the Ray cluster of the bench, if it needs one; nothing of it is left after the block."""
    if backend != "ray":
        yield None
        return
    nodes = RayNodes()
    try:
        nodes.start()
        if left := nodes.left():
            raise RuntimeError(f"the new Ray cluster is not empty: {left}")
        yield nodes
        say(f"{nodes.lost} nodes of Ray ended and were replaced")
    finally:
        if left_processes := nodes.close():
            say(f"processes of Ray that cannot be ended: {left_processes}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that other kinds of chaos do not have."""
    parser.add_argument("--backend", choices=["local", "ray"], default="local", help="(default: %(default)s)")
    parser.add_argument(
        "--each", type=int, default=2, help="how often each fault comes at least (default: %(default)s)"
    )
    parser.add_argument("--fault", action="append", metavar="NAME", help="only these, such as 'kill master'")


def measure(given: argparse.Namespace, directory: Path) -> Case:
    """Runs the chaos; the files of jobs with findings stay. Raises `PerfError` for a fault that there is not."""
    names = every_fault(given.backend)
    if unknown := [name for name in given.fault or [] if name not in names]:
        raise PerfError(f"--fault {unknown[0]!r}: expected one of {', '.join(names)}")
    chance = random.Random(given.seed)
    plan = plan_of(given.fault or names, given.rounds, given.each, chance)
    try:
        with ray_nodes(given.backend) as ray:
            return chaos(plan, chance, directory, ray).case()
    except NoNetworkError as error:
        raise PerfError(str(error)) from None
