"""What every kind of chaos reports: its kills, how long it took to recover, and what its audits counted and found."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from perf.figures import Case, Figure

TOLD_CASES = 20
"""The cases of a fault that are printed of one audit."""


def say(words: str) -> None:
    """Prints progress and faults to standard error."""
    print(words, file=sys.stderr, flush=True)


def kill(pid: int) -> bool:
    """Kills a process by SIGKILL; returns False if it has just ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


class Findings:
    """The result of an audit; those of several can be added up."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.counts = Counter[str]()
        """Counts for the report."""
        self.faults: dict[str, list[str]] = {fault: [] for fault in faults}
        """The cases of each kind of fault, in words."""

    @property
    def held(self) -> bool:
        """Whether there is no fault."""
        return not any(self.faults.values())

    def add(self, other: Findings) -> None:
        """Adds those of another audit."""
        self.counts.update(other.counts)
        for fault, cases in other.faults.items():
            self.faults[fault] += cases


@dataclass
class Report:
    """What was done, and what was found."""

    name: str
    """The case's name."""
    findings: Findings
    until: str = ""
    """What a recovery lasted until, as `slowest` is printed: `longest until all live`."""
    rounds: int = 0
    done: Counter[str] = field(default_factory=Counter)
    """Kills and other disturbances, by what they were done to."""
    slowest: dict[str, float] = field(default_factory=dict)
    """The longest recovery in seconds, by what was disturbed."""

    def took(self, what: str, seconds: float) -> None:
        """Notes a recovery."""
        self.slowest[what] = max(self.slowest.get(what, 0.0), seconds)

    def add(self, found: Findings, place: object) -> None:
        """Adds an audit of what is in `place`, and prints its faults."""
        self.findings.add(found)
        for fault, cases in found.faults.items():
            for words in cases[:TOLD_CASES]:
                say(f"{fault}: {words} ({place})")

    def case(self) -> Case:
        """Returns the figures; there may be no fault."""
        return Case(
            self.name,
            [
                Figure("rounds", self.rounds, ""),
                *(Figure(what, count, "") for what, count in sorted(self.done.items())),
                *(Figure(what, count, "") for what, count in self.findings.counts.items()),
                *(Figure(f"{what}: {self.until}", seconds, "s") for what, seconds in sorted(self.slowest.items())),
                *(Figure(fault, len(cases), "", 0, timed=False) for fault, cases in self.findings.faults.items()),
            ],
        )
