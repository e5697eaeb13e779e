"""One benchmark as a command: `python -m perf.bench.<name> [--quick] [--json]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from rich.console import Console

from perf.figures import Case

Measure = Callable[[bool], list[Case]]
"""Measures; quickly, in a few seconds and less exactly, when told so."""


def show(measure: Measure) -> None:
    """Measures as the command line says, and prints. Exits with 1 when a bound is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--quick", action="store_true", help="smaller and shorter, with bounds that only gross faults break"
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    arguments = parser.parse_args()
    cases = measure(arguments.quick)
    if arguments.quick:
        cases = [case.gross() for case in cases]
    if arguments.json:
        print(json.dumps([case.as_json() for case in cases], indent=2))
    else:
        for case in cases:
            Console().print(case.as_table())
    sys.exit(not all(case.held for case in cases))
