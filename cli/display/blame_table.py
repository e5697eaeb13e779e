"""What made an event loop late, as a table for people: that of `counterpoint status` and of a replay."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from orchestrator.loop_health.slow_spots import Offence
from transport.printable import printable


def blame_table(offences: Sequence[Offence]) -> Table:
    """One row an offence, in the order given. Seconds are at least those shown."""
    table = Table(box=box.SIMPLE_HEAD, title="what made the event loop late", title_justify="left")
    table.add_column("total", justify="right")
    table.add_column("worst", justify="right")
    table.add_column("times", justify="right")
    table.add_column("what", overflow="fold")
    for offence in offences:
        seconds = (f"{value * 1e3:,.1f} ms" for value in (offence.seconds, offence.worst))
        table.add_row(*seconds, str(offence.count), Text(printable(str(offence))))
    return table
