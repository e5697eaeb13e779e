"""A sweep's targets as a table, printed once or kept up to date on a terminal.

Paths, hosts and errors may come from elsewhere, so their markup is not interpreted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from counterpoint.cli.display.console import console_for
from counterpoint.job.number_format import duration
from counterpoint.job.sweep.rows import ReadRows, TargetRow
from counterpoint.sweep.status import TargetStatus

REFRESH_SECONDS = 2.0
PIPE_WIDTH = 140

STYLES = {"SUCCESS": "green", "RUNNING": "yellow", "FAILED": "red", "UNREADABLE": "red", "INTERRUPTED": "yellow"}

TEXT_COLUMNS = ("state", "by", "heard of")


def sweep_console(file: TextIO) -> Console:
    """Creates the console for a sweep's table."""
    return console_for(file, pipe_width=PIPE_WIDTH, markup=False)


def print_table(rows: Sequence[TargetRow], title: str, console: Console) -> None:
    """Prints the table, and below it the errors."""
    console.print(_table(rows, title), *_errors(rows), sep="\n", soft_wrap=True)


async def show_live(read: ReadRows, title: str, console: Console, until_settled: bool) -> None:
    """Keeps the table up to date until cancelled, or, with `until_settled`, until every target is settled."""
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            try:
                rows = await asyncio.to_thread(read)
            except OSError as error:  # of the storage or of a run's directory; the next reading may succeed
                live.update(Text(f"{title}: {error}", "red"), refresh=True)
            else:
                live.update(Group(_table(rows, title), *_errors(rows)), refresh=True)
                if until_settled and all(row.is_settled for row in rows):
                    return
            await asyncio.sleep(REFRESH_SECONDS)


async def print_changes(read: ReadRows, title: str, console: Console) -> None:
    """Prints a line for each change of a target until cancelled: the table's substitute where the output is no terminal."""
    known: dict[str, tuple[str, int]] = {}
    while True:
        with suppress(OSError):  # as in `show_live`
            statuses = [row.status for row in await asyncio.to_thread(read)]
            for status in statuses:
                now = status.state, status.attempts
                if now != known.get(status.target_id, ("PENDING", 0)):
                    where = f" on {status.host}, process {status.pid}" if status.state == "RUNNING" else ""
                    line = f"{title}: {status.target_id}: {status.state}{where}, attempt {status.attempts}"
                    console.print(line, soft_wrap=True)
                known[status.target_id] = now
        await asyncio.sleep(REFRESH_SECONDS)


def _table(rows: Sequence[TargetRow], title: str) -> Table:
    counts = {state: [row.status.state for row in rows].count(state) for state in ("SUCCESS", "RUNNING", "FAILED")}
    states = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "nothing has begun"
    table = Table(box=box.SIMPLE_HEAD, title=f"{title}: {len(rows)} targets, {states}", title_justify="left")
    table.add_column("target", no_wrap=True)  # the last column to be cut on a narrow terminal
    for column in ("state", "by", "attempts", "heard of", "took", "step", "reward"):
        table.add_column(column, justify="left" if column in TEXT_COLUMNS else "right")
    for row in rows:
        status = row.status
        table.add_row(
            status.target_id,
            Text(status.state, STYLES.get(status.state, "dim")),
            f"{status.host}:{status.pid}" if status.host else "-",
            str(status.attempts or "-"),
            _last_heartbeat(status),
            duration(status.duration) if status.duration is not None else "-",
            "-" if row.result is None else row.result.steps,
            "-" if row.result is None else row.result.reward,
        )
    return table


def _last_heartbeat(status: TargetStatus) -> str | Text:
    """The age of a running target's last heartbeat, by this machine's clock and the worker's."""
    if status.state != "RUNNING" or status.heartbeat_at is None:
        return "-"
    ago = max(0.0, time.time() - status.heartbeat_at)
    text = f"{duration(ago)} ago"
    overdue = status.lease_seconds is not None and ago > status.lease_seconds
    return Text(f"{text}, lease over", "red") if overdue else text


def _errors(rows: Sequence[TargetRow]) -> list[Text]:
    """The error of each target's failure or, in yellow, of an earlier attempt."""
    return [
        Text(f"{row.status.target_id}: {row.status.error}", "red" if row.is_settled else "yellow")
        for row in rows
        if row.status.error is not None
    ]
