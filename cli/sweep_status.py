"""`counterpoint sweep status FILE|ROOT`: a sweep's targets as a table, live on a terminal, and as JSON for programs."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from job.configuration.load import load
from job.errors import UserError
from job.summary import duration
from job.sweep.rows import Row, looking, row_of_target
from job.sweep.targets import SweepConfig, targets_of
from sweep.status import TargetStatus, sweep_status
from sweep.store import UnsafeStoreError

USAGE = """usage: counterpoint sweep status FILE|ROOT [--json]

FILE is the sweep's; ROOT the place of one sweep, its `root` with its name, whose results are then not known.
  --json    a list of objects, one a target"""

REFRESH_SECONDS = 2.0

STYLES = {"SUCCESS": "green", "RUNNING": "yellow", "FAILED": "red", "UNREADABLE": "red", "INTERRUPTED": "yellow"}
SETTLED = frozenset({"SUCCESS", "FAILED", "UNREADABLE"})


def main(arguments: list[str]) -> int:
    """The command. 0 whatever became of the targets: the question was answered."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("where", nargs="?")
    parser.add_argument("--json", action="store_true")
    given, unknown = parser.parse_known_args(arguments)
    if given.where is None or unknown:
        print(USAGE)
        return 0 if unknown in (["-h"], ["--help"]) else 2
    look = _look_at(given.where)
    if given.json:
        print(json.dumps([row.as_json() for row in look()], indent=1, default=str))
        return 0
    console = console_for(sys.stdout)
    if console.is_terminal:
        asyncio.run(show_live(look, given.where, console, until_settled=True))
    print_table(look(), given.where, console)
    return 0


def console_for(file: Any) -> Console:
    """A pipe has no width; 80 would cut columns off. Without markup: paths and hosts are others' words."""
    console = Console(file=file, markup=False)
    return console if console.is_terminal else Console(file=file, width=140, markup=False)


def print_table(rows: Sequence[Row], title: str, console: Console) -> None:
    """The table, and below it what went wrong."""
    console.print(_table(rows, title), *_troubles(rows), sep="\n", soft_wrap=True)


async def show_live(look: Callable[[], list[Row]], title: str, console: Console, until_settled: bool) -> None:
    """The table, kept up to date: until cancelled, or until nothing is left to happen by itself."""
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            try:
                rows = await asyncio.to_thread(look)
            except OSError as error:  # the storage's, or that of the runs' directories
                live.update(Text(f"{title}: {error}", "red"), refresh=True)  # as it may be again in a moment
            else:
                live.update(Group(_table(rows, title), *_troubles(rows)), refresh=True)
                if until_settled and all(row.status.state in SETTLED for row in rows):
                    return
            await asyncio.sleep(REFRESH_SECONDS)


def _look_at(where: str) -> Callable[[], list[Row]]:
    if Path(where).is_file():
        config = load(SweepConfig, Path(where), [])
        return looking(config, targets_of(config, Path(where)))
    try:
        if not sweep_status(where):
            raise UserError(
                f"{where}: no target was ever claimed there; expected a sweep's file, or its `root` with its name"
            )
    except (UnsafeStoreError, ValueError, ImportError) as error:
        raise UserError(f"{where}: {error}") from None
    return lambda: [row_of_target(status, None) for status in sweep_status(where)]


def _table(rows: Sequence[Row], title: str) -> Table:
    counts = {state: [row.status.state for row in rows].count(state) for state in ("SUCCESS", "RUNNING", "FAILED")}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "nothing has begun"
    table = Table(box=box.SIMPLE_HEAD, title=f"{title}: {len(rows)} targets, {told}", title_justify="left")
    table.add_column("target", no_wrap=True)  # the last one to be cut on a narrow terminal
    for column in ("state", "by", "attempts", "heard of", "took", "step", "reward"):
        table.add_column(column, justify="left" if column in ("state", "by", "heard of") else "right")
    for row in rows:
        status = row.status
        table.add_row(
            status.target_id,
            Text(status.state, STYLES.get(status.state, "dim")),
            f"{status.host}:{status.pid}" if status.host else "-",
            str(status.attempts or "-"),
            _heard_of(status),
            duration(status.duration) if status.duration is not None else "-",
            "-" if row.result is None else row.result.steps,
            "-" if row.result is None else row.result.reward,
        )
    return table


def _heard_of(status: TargetStatus) -> str | Text:
    """How long ago the worker of a running target was last heard of, by our clock and its."""
    if status.state != "RUNNING" or status.heartbeat_at is None:
        return "-"
    ago = max(0.0, time.time() - status.heartbeat_at)
    text = f"{duration(ago)} ago"
    overdue = status.lease_seconds is not None and ago > status.lease_seconds
    return Text(f"{text}, lease over", "red") if overdue else text


def _troubles(rows: Sequence[Row]) -> list[Text]:
    """What went wrong: for good, or in an attempt before the present one."""
    return [
        Text(f"{row.status.target_id}: {row.status.error}", "red" if row.status.state in SETTLED else "yellow")
        for row in rows
        if row.status.error is not None
    ]
