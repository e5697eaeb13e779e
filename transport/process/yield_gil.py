"""Pacing of threads that compute beside an event loop, so that the loop has most of the GIL while they do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

SHORTEST_REST_SECONDS = 0.0001
"""Shorter rests are added up: a rest takes 60 microseconds however short it is."""

LONGEST_REST_SECONDS = 0.005
"""The limit of a rest, so that an item that took too long does not double the time of the whole."""


def yielding_gil(items: Iterable[Item]) -> Iterator[Item]:
    """Yields `items`, and rests between two of them. For a thread that is not the process's main one, which runs the loop.

    Two threads that compute share the GIL half and half, and a busy loop is twice as slow for as long as it lasts. A thread
    that rests half of its time leaves the loop three quarters. So this one rests for as long as it computed, multiplied by the
    share of the remaining time for which the main thread computed: beside an idle loop it hardly rests. Time during which the
    thread only waited, for a disk or the GIL, counts as rest already. Choose items that take about a millisecond.
    """
    main_clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    began, began_own, began_main = time.perf_counter(), time.thread_time(), time.clock_gettime(main_clock)
    computed_before, owed = began_own, 0.0
    for item in items:
        if owed >= SHORTEST_REST_SECONDS:
            time.sleep(min(owed, LONGEST_REST_SECONDS))
            owed = 0.0
        yield item
        computed = time.thread_time()
        remaining = time.perf_counter() - began - (computed - began_own)
        busy = time.clock_gettime(main_clock) - began_main
        owed += (computed - computed_before) * _busy_share(busy, remaining)
        computed_before = computed


def _busy_share(busy: float, remaining: float) -> float:
    """Returns the share of the remaining time that was busy, in which a busy moment before it counts, too: it may be short."""
    return min(1.0, (busy + SHORTEST_REST_SECONDS) / (max(0.0, remaining) + SHORTEST_REST_SECONDS))
