"""Kills the runner, a guardian or a trial of real experiments, round after round, and audits what each left.

Experiments of six trials run in processes of this machine, under FIFO, ASHA and PBT in turn. A round is one SIGKILL at a random
moment; a runner that was killed is started again, and its experiment goes on. After some rounds the experiment is let to its
end and audited (`perf/chaos/tune/audit.py`).
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

from counterpoint.transport.process.child import Child
from counterpoint.transport.process.launch import descendants, live_processes
from counterpoint.tune.runner.journal import holds_experiment
from perf.chaos.report import Findings, Report, kill, say
from perf.chaos.tune.audit import FAULTS, LEFT, STOOD_STILL, audit
from perf.chaos.tune.experiment import HEARD, NAME
from perf.figures import Case

SCHEDULERS = ("fifo", "asha", "pbt")
TARGETS = ("runner", "guardian", "trial")
ROUNDS_OF_AN_EXPERIMENT = (3, 7)
MOMENT_SECONDS = 1.2
"""The longest pause before a fault."""
DEADLINE_SECONDS = 120.0
"""Deadline for an experiment to end, or to start again."""
LEFT_SECONDS = 15.0
"""How long processes of a runner that has ended may live on."""


class StandsStillError(Exception):
    """An experiment does not go on."""

    kind = STOOD_STILL


class ProcessesLeftError(StandsStillError):
    """Processes of an experiment outlive its runner."""

    kind = LEFT


class Victim:
    """One experiment, and the process that runs it at present."""

    def __init__(self, directory: Path, scheduler: str, seed: int) -> None:
        self.directory, self.scheduler, self.seed = directory, scheduler, seed
        self._log = directory / "log"
        self.start()

    def start(self) -> None:
        """Starts the runner, or starts it again."""
        command = [sys.executable, "-P", "-m", "perf.chaos.tune.experiment", str(self.directory)]
        command += [self.scheduler, str(self.seed)]
        self._process = Child("the experiment", command, log=self._log)

    @property
    def is_over(self) -> bool:
        """Whether its process has ended."""
        return self._process.code is not None

    @property
    def runner(self) -> int | None:
        """The process of the runner, below its guardian."""
        return next(iter(children_of(self._process.pid)), None)

    def wait_for_life(self) -> None:
        """Waits until the runner has trials at work. Raises `StandsStillError`."""
        place = self.directory / NAME
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not self.is_over:
            runner = self.runner
            if runner is not None and holds_experiment(place) and any(map(children_of, children_of(runner))):
                return
            if time.monotonic() > deadline:
                raise StandsStillError(f"{self.directory}: no trial runs after {DEADLINE_SECONDS:g} s")
            time.sleep(0.02)

    def kill(self, target: str, chance: random.Random) -> bool:
        """Kills one process; returns False if there is none of this kind now."""
        runner = self.runner
        if runner is None:
            return False
        if target == "runner":
            below = descendants(runner)
            kill(runner)
            self._process.wait()
            self._wait_until_gone(below)
            self.start()
            return True
        guardians = children_of(runner)
        below = [pid for guardian in guardians for pid in descendants(guardian)]
        candidates = guardians if target == "guardian" else below
        if not candidates:
            return False
        kill(chance.choice(candidates))
        return True

    def _wait_until_gone(self, processes: list[int]) -> None:
        deadline = time.monotonic() + LEFT_SECONDS
        while not {pid for pid, *_ in live_processes()}.isdisjoint(processes):
            if time.monotonic() > deadline:
                raise ProcessesLeftError(f"{self.directory}: processes of a runner that has ended live on: {processes}")
            time.sleep(0.02)

    def finish(self) -> None:
        """Lets it come to its end. Raises `StandsStillError`."""
        below = descendants(self._process.pid)
        try:
            code = self._process.wait(DEADLINE_SECONDS)
        except TimeoutError:
            raise StandsStillError(f"{self.directory}: not finished after {DEADLINE_SECONDS:g} s") from None
        if code or not (self.directory / HEARD).exists():
            raise StandsStillError(f"{self.directory}: the runner ended with {code}; see {self._log}")
        self._wait_until_gone(below)

    def close(self) -> None:
        """Ends what is left."""
        if not self.is_over:
            kill(self._process.pid)
            self._process.wait()


def children_of(process: int) -> list[int]:
    """Returns the children of a process; none if it is gone."""
    return [pid for pid, _, parent, _ in live_processes() if parent == process]


def chaos(rounds: int, seed: int, parent: Path) -> Report:
    """Does so many rounds at least; the files of experiments with findings stay in `parent`."""
    report, chance = Report("tune-chaos", Findings(FAULTS)), random.Random(seed)
    report.done = Counter({f"kill {target}": 0 for target in TARGETS})
    while report.rounds < rounds:
        number = report.findings.counts["experiments"]
        place = parent / f"experiment_{number:03d}"
        place.mkdir(parents=True)
        scheduler = SCHEDULERS[number % len(SCHEDULERS)]
        found = _one_experiment(place, scheduler, chance, report)
        found.counts["experiments"] = 1
        report.add(found, f"{place}, {scheduler}")
        if found.held:
            shutil.rmtree(place)
        say(f"{report.rounds} rounds, {sum(map(len, report.findings.faults.values()))} findings")
    return report


def _one_experiment(place: Path, scheduler: str, chance: random.Random, report: Report) -> Findings:
    victim = Victim(place, scheduler, chance.randrange(1000))
    try:
        for _ in range(chance.randint(*ROUNDS_OF_AN_EXPERIMENT)):
            victim.wait_for_life()
            time.sleep(chance.uniform(0.0, MOMENT_SECONDS))
            target = chance.choices(TARGETS, (3, 1, 2))[0]
            if victim.is_over or not victim.kill(target, chance):
                continue
            report.rounds += 1
            report.done[f"kill {target}"] += 1
        victim.finish()
        return audit(place, scheduler)
    except StandsStillError as error:
        found = Findings(FAULTS)
        found.faults[error.kind].append(str(error))
        return found
    finally:
        victim.close()


def measure(given: argparse.Namespace, directory: Path) -> Case:
    """Runs the chaos; the files of experiments with findings stay."""
    return chaos(given.rounds, given.seed, directory).case()
