"""One benchmark as a command: `python -m perf.bench.<name> [--quick | --full] [--json]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import TypeVar

from rich.console import Console

from perf.figures import Case
from perf.noise import measured_noise

T = TypeVar("T")


class Size(Enum):
    """The size of a measurement."""

    QUICK = "quick"
    """Some seconds a case; shows gross faults only."""
    DEFAULT = "default"
    """A group of cases within five minutes on two quiet cores."""
    FULL = "full"
    """The sizes that `docs/performance.md` reports."""

    def pick(self, quick: T, default: T, full: T) -> T:
        """The value for this size."""
        return {Size.QUICK: quick, Size.DEFAULT: default, Size.FULL: full}[self]

    @property
    def flags(self) -> list[str]:
        """The flags that ask for it on a command line."""
        return [] if self is Size.DEFAULT else [f"--{self.value}"]


Measure = Callable[[Size], list[Case]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that every benchmark has."""
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", action="store_true", help="smaller and shorter, with bounds that only gross faults break"
    )
    size.add_argument("--full", action="store_true", help="the sizes that docs/performance.md reports; many minutes")
    parser.add_argument("--json", action="store_true", help="print JSON")


def size_of(arguments: argparse.Namespace) -> Size:
    """Returns the size that those arguments ask for."""
    return Size.QUICK if arguments.quick else Size.FULL if arguments.full else Size.DEFAULT


def show(measure: Measure) -> None:
    """Measures as the command line asks, prints, and exits with 1 if a bound is broken."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args()
    size = size_of(arguments)
    with measured_noise() as noise:
        cases = measure(size)
    cases = [replace(case.gross() if size is Size.QUICK else case, noise=noise.share) for case in cases]
    if arguments.json:
        print(json.dumps([case.as_json() for case in cases], indent=2))
    else:
        for case in cases:
            Console().print(case.as_table())
    sys.exit(not all(case.held for case in cases))
