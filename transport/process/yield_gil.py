"""Pacing of threads that compute beside an event loop, so that the loop has most of the GIL while they do."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

LONGEST_REST_SECONDS = 0.005
"""After an item that took longer than it should, so that whoever waits for the whole need not wait twice."""


def yielding_gil(items: Iterable[Item]) -> Iterator[Item]:
    """Hands on `items`, and rests between two of them for as long as this thread computed; for a thread other than the loop's.

    Two threads that compute share the GIL half and half, and a busy loop is twice as slow for as long as it lasts. A thread that
    rests half of its time leaves the loop three quarters. Time that the thread only waited, for a disk or the GIL, counts as
    rest already. Choose items that take about a millisecond: a rest takes 60 microseconds at least.
    """
    computed = 0.0
    for item in items:
        if computed > 0:
            time.sleep(min(computed, LONGEST_REST_SECONDS))
        began = time.thread_time()
        yield item
        computed = time.thread_time() - began
