"""`counterpoint replay DUMP`: runs the daemon's own step boundary over a dump and prints its times (`job/replay/replay.py`)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cli.arguments.replay import add_arguments, settings_of
from cli.display.console import console_for
from cli.display.replay_tables import print_replay, print_whole_step
from job.replay.replay import replay_dump
from job.replay.trusted_dump import open_trusted
from job.replay.whole_step import whole_step
from transport.errors import UserError

PICTURES = (".png", ".svg", ".pdf")
PIPE_WIDTH = 120


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` for a dump that cannot be replayed."""
    given = _parser().parse_args(arguments)
    if given.timeline is not None and given.timeline.suffix not in PICTURES:
        raise UserError(f"--timeline {given.timeline}: expected a file that ends in {', '.join(PICTURES)}")
    settings = settings_of(given)
    dump = open_trusted(given.dump, given.trust)
    try:
        found = replay_dump(dump, settings)
    except ValueError as error:
        raise UserError(f"{given.dump}: {error}") from None
    step = whole_step(given.dump, dump.header.step)
    if given.json:
        print(json.dumps(found.as_json() | {"whole_step": step and step.as_json()}, indent=2))
    else:
        console = console_for(pipe_width=PIPE_WIDTH)
        print_replay(found, dump, console)
        print_whole_step(step, console)
    if given.timeline is not None:
        from cli.display.timeline import draw

        draw(found.trace, given.timeline, f"{dump.directory}: {found.nbytes / 1e6:,.0f} MB")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint replay",
        description="Runs the daemon's own step boundary over a dump, after an idle baseline, and shows the wall time of each "
        "phase and the event loop's lag meanwhile, sampled every millisecond. What the boundary writes goes to a temporary "
        "directory (TMPDIR).",
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw phases against lag: PNG, SVG or PDF")
    return parser
