"""Pacing of threads that compute beside an event loop, so that the loop has most of the GIL while they do."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def unhurried(items: Iterable[Item]) -> Iterator[Item]:
    """Hands on `items`, and rests after each for as long as it was worked on; for a thread other than the loop's.

    Two threads that compute share the GIL half and half, and a busy loop is twice as slow for as long as it lasts. A thread that
    rests half of its time leaves the loop three quarters. Choose items that take about a millisecond: a rest takes
    60 microseconds at least.
    """
    for item in items:
        began = time.perf_counter()
        yield item
        time.sleep(time.perf_counter() - began)
