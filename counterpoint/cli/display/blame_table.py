"""The table of slow spots, which `counterpoint status` and a replay print."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from counterpoint.run.loop_health.slow_spots import SlowSpot
from counterpoint.transport.printable import printable


def blame_table(slow_spots: Sequence[SlowSpot]) -> Table:
    """Builds a table with a row for each slow spot, in the given order. The true times are at least those shown."""
    table = Table(box=box.SIMPLE_HEAD, title="what made the event loop late", title_justify="left")
    table.add_column("total", justify="right")
    table.add_column("worst", justify="right")
    table.add_column("times", justify="right")
    table.add_column("what", overflow="fold")
    for slow_spot in slow_spots:
        seconds = (f"{value * 1e3:,.1f} ms" for value in (slow_spot.seconds, slow_spot.worst))
        table.add_row(*seconds, str(slow_spot.count), Text(printable(str(slow_spot))))
    return table
