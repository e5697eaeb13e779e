"""Pacing of threads that compute beside an event loop, so that the loop has most of the GIL while they do."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

BUSY_SHARE = 0.5
"""A main thread that computes for this share of the time counts as always busy: for the rest it may wait for a core."""

SHORTEST_REST_SECONDS = 0.0001
"""Shorter rests are added up: a rest takes 60 microseconds however short it is."""

LONGEST_REST_SECONDS = 0.005
"""The limit of a rest, so that an item that took too long does not double the time of the whole."""


def yielding_gil(items: Iterable[Item]) -> Iterator[Item]:
    """Yields `items`, and rests between two of them. For a thread that is not the process's main one, which runs the loop.

    Two threads that compute share the GIL half and half, and a busy loop is twice as slow for as long as it lasts. A thread
    that rests half of its time leaves the loop three quarters. So this one rests for as long as it computed, if the main thread
    was busy for `BUSY_SHARE` of the remaining time, and for proportionally less if it was less busy: beside an idle loop it
    hardly rests. Time during which this thread only waited, for a disk or the GIL, counts as rest already. Choose items that
    take about a millisecond. A thread that runs a loop itself does not rest: that would block it.
    """
    if _runs_loop():
        yield from items
        return
    began, began_own, began_main = time.perf_counter(), time.thread_time(), _main_thread_seconds()
    computed_before, owed = began_own, 0.0
    for item in items:
        if owed >= SHORTEST_REST_SECONDS:
            time.sleep(min(owed, LONGEST_REST_SECONDS))
            owed = 0.0
        yield item
        computed = time.thread_time()
        remaining = time.perf_counter() - began - (computed - began_own)
        busy = _main_thread_seconds() - began_main
        owed += (computed - computed_before) * min(1.0, _busy_share(busy, remaining) / BUSY_SHARE)
        computed_before = computed


def _runs_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _main_thread_seconds() -> float:
    """Returns the CPU seconds of the process's main thread; outside Linux, as if it always computed."""
    if sys.platform != "linux":
        return time.perf_counter()
    thread = threading.main_thread().ident
    assert thread is not None, "it runs"
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _busy_share(busy: float, remaining: float) -> float:
    """Returns the share of the remaining time for which the main thread was busy.

    `SHORTEST_REST_SECONDS` before count as busy: at first the remaining time is too short to tell.
    """
    return (busy + SHORTEST_REST_SECONDS) / (max(0.0, remaining) + SHORTEST_REST_SECONDS)
