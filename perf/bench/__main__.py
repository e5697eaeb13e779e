"""`python -m perf.bench [NAME...]`: measures, and prints which bounds hold (`perf/README.md` explains the tables)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from perf.bench.cases import CASES, CaseFailed, measure_case, undecided
from perf.bench.command import Size, add_arguments, size_of
from perf.figures import Case

PIPE_WIDTH = 120


def main(arguments: list[str]) -> int:
    """Runs the command. Returns 1 if a bound is broken. A bound on time that other processes may have broken does not count."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in CASES]:
        parser.error(f"there is no case {unknown[0]!r}; the cases are {', '.join(CASES)}")
    names = list(dict.fromkeys(given.names or CASES))
    cases, failed = _measure_all(names, size_of(given), print_tables=not given.json)
    noise, varying = undecided(cases)
    if noise:
        print(
            f"bench: other processes took up to {noise:.0%} of the machine's CPU; broken bounds on "
            "time do not count in such cases. Run them again on a quiet machine",
            file=sys.stderr,
        )
    for name in varying:
        print(
            f"bench: {name}: its bound is broken, but not in three quarters of its rounds, or not in a second "
            "measurement, or more than a tenth of the lag is that of an idle loop, so it does not count. Run the case again",
            file=sys.stderr,
        )
    if given.json:
        print(json.dumps([case.as_json() for case in cases], indent=2))
    return int(failed or not all(case.held for case in cases))


def _measure_all(names: Sequence[str], size: Size, print_tables: bool) -> tuple[list[Case], bool]:
    """Measures one after the other; returns the cases, and whether any failed. A failure does not end the others."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    cases: list[Case] = []
    failed = False
    for name in names:
        if print_tables:
            console.print(f"{name}: {CASES[name]}", highlight=False)
        started = time.monotonic()
        try:
            measured = _measure(name, size)
        except CaseFailed as error:
            print(f"bench: error: {error}", file=sys.stderr)
            failed = True
            continue
        cases += measured
        if print_tables:
            for case in measured:
                console.print(case.as_table())
            console.print(f"took {time.monotonic() - started:.0f} s\n", highlight=False)
    return cases, failed


def _measure(name: str, size: Size) -> list[Case]:
    """Measures a case, and once more if it broke a bound: a fault of the code is there both times.

    Raises `CaseFailed` if the first one fails; without figures of a second one, those of the first stand.
    """
    first = measure_case(name, size)
    if size is Size.QUICK or all(case.held for case in first):
        return first
    try:
        second = measure_case(name, size)
    except CaseFailed as error:
        print(f"bench: error: when measured once more, {error}", file=sys.stderr)
        return first
    return [case.measured_again(other) for case, other in zip(first, second, strict=True)]


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<17} {summary}" for name, summary in CASES.items())
    parser = argparse.ArgumentParser(
        prog="python -m perf.bench",
        description="Measures Counterpoint against its own bounds, each case in a process of its own. All of them take five "
        f"minutes on two quiet cores; a case that breaks a bound is measured once more.\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases (default: all)")
    add_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
