"""`counterpoint sweep status FILE|ROOT`: prints a sweep's targets as a table, live on a terminal, or as JSON for programs."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from cli.display.sweep_table import print_table, show_live, sweep_console
from job.sweep.rows import rows_reader

USAGE = """usage: counterpoint sweep status FILE|ROOT [--json]

FILE is the sweep's; ROOT the place of one sweep, its `root` with its name, whose results are then not known.
  --json    a list of objects, one a target"""


def main(arguments: list[str]) -> int:
    """Runs the command. Returns 0 whatever the targets' states: they were printed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("where", nargs="?")
    parser.add_argument("--json", action="store_true")
    try:
        given, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        print(USAGE)
        return 2
    if given.where is None or unknown:
        print(USAGE)
        return 0 if unknown in (["-h"], ["--help"]) else 2
    read = rows_reader(given.where)
    if given.json:
        print(json.dumps([row.as_json() for row in read()], indent=1, default=str))
        return 0
    console = sweep_console(sys.stdout)
    if console.is_terminal:
        asyncio.run(show_live(read, given.where, console, until_settled=True))
    print_table(read(), given.where, console)
    return 0
