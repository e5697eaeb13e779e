"""`counterpoint attribute DUMP`: says which phases of a step boundary block the loop (`job/replay/attribute.py`)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from cli.replay import add_arguments, console_for_tables, lag_cells, opened, say_whole_step, settings_of
from job.errors import UserError
from job.replay.attribute import Attribution, attribute
from job.replay.boundary import Recording
from job.replay.replay import Settings, on_daemons_loop
from orchestrator.loop_health.threads import in_thread
from orchestrator.rollouts.dump import Dump


def main(arguments: list[str]) -> int:
    """The command."""
    given = _parser().parse_args(arguments)
    dump = opened(given.dump, given.trust)
    how = {"rounds": 1, "baseline_seconds": 0.5} if given.quick else {"rounds": 3, "baseline_seconds": 1.0}
    settings = settings_of(given, **how)
    try:
        found = on_daemons_loop(lambda: _attribute(dump, settings))
    except ValueError as error:
        raise UserError(f"{given.dump}: {error}") from None
    if given.json:
        print(json.dumps([attribution.as_json() for attribution in found], indent=2))
    else:
        console_for_tables().print(_table(found, dump))
        say_whole_step(dump)
    return 0


async def _attribute(dump: Dump, settings: Settings) -> list[Attribution]:
    await in_thread(dump.populate)
    return await attribute(Recording(dump.header, await in_thread(dump.rollouts)), settings)


def _table(found: Sequence[Attribution], dump: Dump) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=escape(str(dump.directory)), title_justify="left")
    for column in ("phase", "alone", "lag p50", "p99", "max", "with all before", "lag p50", "p99", "max", ""):
        table.add_column(column, justify="left" if column in ("phase", "") else "right", no_wrap=column == "")
    idle = found[0].idle
    table.add_row("idle", f"{idle.seconds:.3f} s", *lag_cells(idle.lag))
    for each in found:
        verdict = "[red]blocks the loop[/red]" if each.blocks else "only takes time"
        alone, together = each.alone, each.together
        table.add_row(
            each.phase,
            f"{alone.seconds:.3f} s",
            *lag_cells(alone.lag),
            f"{together.seconds:.3f} s",
            *lag_cells(together.lag),
            verdict,
        )
    return table


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
