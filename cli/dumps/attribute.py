"""`counterpoint attribute DUMP`: prints which phases of a step boundary block the loop (`job/replay/attribute.py`)."""

from __future__ import annotations

import argparse
import json

from cli.arguments.replay import add_arguments, parse, settings_of
from cli.display.console import console_for
from cli.display.replay_tables import attribution_table, print_whole_step
from job.replay.attribute import attribute_dump
from job.replay.dump_directory import open_trusted
from job.replay.whole_step import whole_step
from transport.errors import UserError

PIPE_WIDTH = 120


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` for a dump that cannot be replayed."""
    given = parse(_parser(), arguments)
    dump = open_trusted(given.dump, given.trust)
    how = {"rounds": 1, "baseline_seconds": 0.5} if given.quick else {"rounds": 3, "baseline_seconds": 1.0}
    settings = settings_of(given, **how)
    try:
        found = attribute_dump(dump, settings)
    except ValueError as error:
        raise UserError(f"{given.dump}: {error}") from None
    if given.json:
        print(json.dumps([attribution.as_json() for attribution in found], indent=2))
    else:
        console = console_for(pipe_width=PIPE_WIDTH)
        console.print(attribution_table(found, dump))
        print_whole_step(whole_step(dump.directory, dump.header.step), console)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint attribute",
        description="Runs each phase of the step boundary over a dump alone, then together with all before it, beside an idle "
        "baseline, and says which block the event loop and which only take time. A phase blocks when it makes the loop "
        "more than twice as late as it is idle, and by more than 5 ms.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="one round instead of three")
    return parser
