"""Kills workers of a sweep at random, round after round, and checks it with an independent witness.

In each round workers race over targets. Busy workers are killed by SIGKILL at random moments and replaced, until all targets read
SUCCESS. The witness (`perf/chaos/sweep_worker.py`) does not use leases: each body locks a file for as long as it lives, and the
kernel refuses the lock to a second one.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from counterpoint.sweep.status import sweep_status
from perf.chaos.report import Findings, Report, say
from perf.chaos.sweep_worker import Witness, targets, work
from perf.figures import Case

BODY_SECONDS = 0.1
ROUND_SECONDS = 300.0


@dataclass(frozen=True)
class Settings:
    """The settings of the chaos."""

    workers: int = 8
    targets: int = 40
    kills: int = 12
    """Kills in each round, unless all targets are done sooner."""
    heartbeat: float = 0.3
    lease: float = 1.8
    """Short, so that rounds are short. Under load a heartbeat may be late: its body is stopped, and runs once more."""


def chaos(root: str, witness: Path, settings: Settings, chance: random.Random) -> Counter[str]:
    """Runs one round. Returns counts; those of `FAULTS` must be zero. Raises `TimeoutError` when it does not end."""
    killed = _race(root, witness, settings, chance)
    seen = Witness(witness).testimony()
    statuses = sweep_status(root, [target.target_id for target in targets(settings.targets)])
    ended = {(target_id, token) for target_id, token in seen.events["end"]}
    return Counter(
        {
            "targets": settings.targets,
            "succeeded": sum(found.state == "SUCCESS" for found in statuses),
            "workers killed": killed,
            "bodies begun": len(seen.events["begin"]),
            "bodies cut short by a kill": len(seen.events["begin"]) - len(seen.events["end"] + seen.events["stopped"]),
            "bodies stopped because their lease was lost": len(seen.events["stopped"]),
            "bodies that ended, and whose worker was killed before it recorded that": len(ended) - settings.targets,
            "taken over": sum((found.token or 1) - 1 for found in statuses),
            "not succeeded": sum(found.state != "SUCCESS" for found in statuses),
            "two alive at once": len(seen.events["overlap"]),
            "tokens that did not rise": len(seen.out_of_order),
            "results of a body that did not end": sum((f.target_id, f.token) not in ended for f in statuses),
        }
    )


FAULTS = (
    "not succeeded",
    "two alive at once",
    "tokens that did not rise",
    "results of a body that did not end",
)


def _race(root: str, witness: Path, settings: Settings, chance: random.Random) -> int:
    """Runs workers until every one that was not killed has ended. Returns how many were killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["perf.chaos.sweep_worker", "boto3"])

    # The server that forks workers has the environment of its own start, not that of `point_at`.
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    terms = settings.heartbeat, settings.lease

    def started() -> ForkServerProcess:
        arguments = (environment, root, witness, settings.targets, BODY_SECONDS, *terms)
        process = context.Process(target=_work_in, args=arguments, daemon=True)
        process.start()
        return process

    processes = [started() for _ in range(settings.workers)]
    give_up, killed = time.monotonic() + ROUND_SECONDS, 0
    while any(process.is_alive() for process in processes):
        if time.monotonic() > give_up:
            for process in processes:
                process.kill()
            raise TimeoutError(f"{root}: workers are still running after {ROUND_SECONDS:g} s")
        time.sleep(chance.uniform(0.02, 0.2))
        if killed == settings.kills:
            continue
        # Only a worker that has had a target: a kill while it starts would test nothing.
        busy = Witness(witness).recorded_processes()
        at_work = [index for index, process in enumerate(processes) if process.is_alive() and process.pid in busy]
        if at_work:
            victim = chance.choice(at_work)
            processes[victim].kill()
            processes[victim].join()
            processes[victim] = started()
            killed += 1
    failed = [process.exitcode for process in processes if process.exitcode]
    if failed:
        raise RuntimeError(f"{root}: workers ended with {failed}")
    return killed


def _work_in(environment: dict[str, str], *arguments: Any) -> None:
    os.environ |= environment
    work(*arguments)


@contextlib.contextmanager
def roots(storage: str, directory: Path) -> Iterator[str]:
    """Yields a parent for the roots of the rounds."""
    if storage == "local":
        yield str(directory / "sweeps")
        return
    import boto3

    from perf.chaos.s3_server import point_at, s3_application, serving

    with serving(s3_application()) as address:
        point_at(address)
        boto3.client("s3").create_bucket(Bucket="chaos")
        yield "s3://chaos"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that other kinds of chaos do not have."""
    parser.add_argument("--workers", type=int, default=Settings.workers)
    parser.add_argument("--targets", type=int, default=Settings.targets)
    parser.add_argument("--kills", type=int, default=Settings.kills, help="in each round")
    parser.add_argument("--storage", choices=["local", "s3"], default="local", help="s3 is moto's server, on loopback")


def measure(given: argparse.Namespace, directory: Path) -> Case:
    """Runs the chaos in a directory."""
    settings, chance = Settings(given.workers, given.targets, given.kills), random.Random(given.seed)
    report = Report("sweep", Findings(FAULTS))
    with roots(given.storage, directory) as root:
        for number in range(given.rounds):
            witness = directory / f"witness-{number}"
            witness.mkdir()
            counts, found = chaos(f"{root}/round-{number}", witness, settings, chance), Findings(FAULTS)
            for fault in FAULTS:
                found.faults[fault] += ["a target"] * counts.pop(fault)
            found.counts = counts
            report.rounds += 1
            report.add(found, witness)
            say(f"round {report.rounds} of {given.rounds}: {report.findings.counts['workers killed']} killed")
    return report.case()
