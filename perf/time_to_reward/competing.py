"""Other work for the machine: half of each core is taken, in turns, by a process of ordinary priority.

It runs as a program of its own below a guardian, so that it ends with the program that started it, whatever becomes of that.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from counterpoint.transport.process.child import Child

PERIOD_SECONDS = 0.1
"""The time in seconds of which the process of each core takes half as CPU time, whatever runs beside it."""


@contextmanager
def competing_load() -> Iterator[int]:
    """Keeps half of this machine's cores busy during the block. Yields the process below which all of the load runs."""
    with Child("the competing load", [sys.executable, "-m", "perf.time_to_reward.competing"]) as load:
        yield load.pid


def main() -> None:
    """Starts one process a core, which never end by themselves."""
    cores = sorted(os.sched_getaffinity(0))
    for position, core in enumerate(cores):
        if os.fork() == 0:
            os.sched_setaffinity(0, {core})
            _take_half(PERIOD_SECONDS * position / len(cores))
    while True:
        time.sleep(3600)


def _take_half(offset: float) -> None:
    """Computes for half of each period; periods begin `offset` seconds after a multiple of their length, by the clock."""
    while True:
        into = (time.monotonic() - offset) % PERIOD_SECONDS
        end, until = time.monotonic() + PERIOD_SECONDS - into, time.thread_time() + PERIOD_SECONDS / 2
        while time.thread_time() < until and time.monotonic() < end:
            pass
        time.sleep(max(0.0, end - time.monotonic()))


if __name__ == "__main__":
    main()
