"""`counterpoint replay DUMP`: runs the daemon's own step boundary over a dump and shows what it takes
(`job/replay/replay.py`)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from cli.display.blame_table import blame_table
from job.errors import UserError
from job.replay.replay import Replay, Settings, replay_dump
from job.replay.whole_step import in_words, whole_step
from job.summary import milliseconds
from orchestrator.loop_health.lag import LagDistribution
from orchestrator.rollouts.dump import Dump, DumpError, open_dump

PICTURES = (".png", ".svg", ".pdf")


def main(arguments: list[str]) -> int:
    """The command."""
    given = _parser().parse_args(arguments)
    if given.timeline is not None and given.timeline.suffix not in PICTURES:
        raise UserError(f"--timeline {given.timeline}: expected a file that ends in {', '.join(PICTURES)}")
    settings = settings_of(given)
    dump = opened(given.dump, given.trust)
    try:
        found = replay_dump(dump, settings)
    except ValueError as error:
        raise UserError(f"{given.dump}: {error}") from None
    if given.json:
        step = whole_step(given.dump, dump.header.step)
        print(json.dumps(found.as_json() | {"whole_step": step and step.as_json()}, indent=2))
    else:
        show(found, dump)
        say_whole_step(dump)
    if given.timeline is not None:
        from job.replay.timeline import draw

        draw(found.trace, given.timeline, f"{dump.directory}: {found.nbytes / 1e6:,.0f} MB")
    return 0


def opened(directory: Path, trust: bool) -> Dump:
    """The dump in `directory`. Raises `UserError` if it cannot be read, or names a custom advantage function without `trust`."""
    try:
        dump = open_dump(directory)
    except DumpError as error:
        raise UserError(str(error)) from None
    kind = dump.header.advantage.kind
    if ":" in kind and not trust:
        raise UserError(
            f"{directory}/header.json names the advantage function {kind!r}, and a replay would import and call it. If you trust "
            "the author of the dump, add --trust"
        )
    return dump


def show(found: Replay, dump: Dump) -> None:
    """The table, and who made the loop late."""
    console = console_for_tables()
    header = dump.header
    size = f"{header.rollouts} rollouts, {header.turns} turns, {found.nbytes / 1e6:,.0f} MB"
    console.print(f"{dump.directory}: {size}", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("phase", "wall", "lag p50", "p99", "max"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for row in found.rows:
        table.add_row(row.phase, f"{row.seconds:.3f} s", *lag_cells(row.lag))
    console.print(table)
    if found.slow_spots:
        console.print(blame_table(found.slow_spots))
    else:
        console.print("  Nothing made the loop later than it is when idle.")


def say_whole_step(dump: Dump) -> None:
    """Prints where the time of the whole step went, of which the boundary is a part."""
    text = in_words(whole_step(dump.directory, dump.header.step))
    console_for_tables().print(text, highlight=False, markup=False, soft_wrap=True)


def console_for_tables() -> Console:
    """Standard output; wide enough for a table where it is no terminal and has no width."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def lag_cells(lag: LagDistribution) -> list[str]:
    """Median, 99th percentile and maximum."""
    return [milliseconds(value) for value in (lag.median, lag.p99, lag.max)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `replay` and `attribute` have in common."""
    parser.add_argument(
        "--synthetic-traffic",
        type=int,
        default=0,
        metavar="N",
        help="tasks that keep the loop busy meanwhile, as rollouts in flight do (default: none)",
    )
    parser.add_argument(
        "--gather-chunk-size",
        type=int,
        metavar="N",
        help="rollouts merged in one thread call (default: the dump's own)",
    )
    parser.add_argument("--process-pool", action="store_true", help="merge in a process instead of a thread")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="import and call the advantage function that the dump names, if it is not built in",
    )
    parser.add_argument("dump", type=Path, metavar="DUMP", help="a dump's directory, such as raw_rollouts/step_7")


def settings_of(given: argparse.Namespace, **settings: float) -> Settings:
    """Raises `UserError`."""
    for name in ("synthetic_traffic", "gather_chunk_size"):
        value = getattr(given, name)
        least = 0 if name == "synthetic_traffic" else 1
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} = {value}; expected at least {least}")
    return Settings(given.synthetic_traffic, given.gather_chunk_size, given.process_pool, **settings)  # type: ignore[arg-type]


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
