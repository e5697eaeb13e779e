"""Pacing of threads that compute beside an event loop, so that the loop has most of the GIL while they do."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

LONGEST_REST_SECONDS = 0.005
"""The limit of a rest, so that an item that took too long does not double the time of the whole."""


def yielding_gil(items: Iterable[Item]) -> Iterator[Item]:
    """Yields `items`, and rests between two of them for as long as this thread computed. Not for the loop's thread.

    Two threads that compute share the GIL half and half, and a busy loop is twice as slow for as long as it lasts. A thread
    that rests half of its time leaves the loop three quarters. Time during which the thread only waited, for a disk or the
    GIL, counts as rest already. Choose items that take about a millisecond: a rest takes 60 microseconds at least.
    """
    computed = 0.0
    for item in items:
        if computed > 0:
            time.sleep(min(computed, LONGEST_REST_SECONDS))
        began = time.thread_time()
        yield item
        computed = time.thread_time() - began
