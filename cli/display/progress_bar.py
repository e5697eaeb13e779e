"""The progress of an iteration, on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10.0
"""Seconds between two plain lines."""

Item = TypeVar("Item")


def progress_bar(items: Iterable[Item], total: int, unit: str) -> Iterator[Item]:
    """Yields `items`, of which there are `total`, and shows how many were yielded."""
    console = Console(stderr=True)
    return _with_bar(items, total, unit, console) if console.is_terminal else _with_lines(items, total, unit, console)


def _with_bar(items: Iterable[Item], total: int, unit: str, console: Console) -> Iterator[Item]:
    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield from progress.track(items, total=total)


def _with_lines(items: Iterable[Item], total: int, unit: str, console: Console) -> Iterator[Item]:
    last = time.monotonic()
    for count, item in enumerate(items, 1):
        yield item
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            console.print(f"{count}/{total} {unit}", highlight=False, soft_wrap=True)
