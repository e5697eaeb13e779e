"""Records when the machine stood still, so that a lag of that time is not taken for that of the code that a benchmark measures.

On each CPU, a process of real-time priority sleeps for a millisecond at a time. No ordinary process delays it, however many there
are. A long system call may, since the kernel does not interrupt those everywhere, but only on its own CPU. While the processes of
all CPUs are late, nothing ran at all: the host of a virtual machine had stopped it.

A stall is recorded from the moment at which the last of them was due, so up to a millisecond too short. Real-time priority
needs a right (`CAP_SYS_NICE`); without it no stalls are recorded.

    python perf/stalls.py CPU FILE     # one such process, which writes its late wakings; started by `recorded_stalls`
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

INTERVAL_SECONDS = 0.001
LATE_SECONDS = 0.001
"""A process that wakes so much later than it asked for is late."""

PRIORITY = 50
"""A priority between those of the kernel's own threads: its interrupt threads have 50, its watchdogs 99."""

START_SECONDS = 10.0
"""Longest wait for a process to watch its CPU."""

Interval = tuple[float, float]
"""Begin and end in seconds of `time.perf_counter`, which all processes of a machine share on Linux."""


@dataclass(slots=True)
class Stalls:
    """The result of `recorded_stalls`, set once its block has ended."""

    recorded: bool = False
    """Whether stalls could be recorded."""
    intervals: list[Interval] = field(default_factory=list)
    """The times when the machine stood still, in order; none overlap."""

    @property
    def seconds(self) -> float:
        """The time of all stalls together."""
        return sum(end - begin for begin, end in self.intervals)

    def within(self, begin: float, end: float) -> float:
        """Returns the seconds between `begin` and `end` in which the machine stood still."""
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in self.intervals)


@contextmanager
def recorded_stalls() -> Iterator[Stalls]:
    """Records the stalls of the CPUs that this process may use, during the block."""
    stalls = Stalls()
    with tempfile.TemporaryDirectory(prefix="counterpoint-stalls-") as directory:
        files = [Path(directory) / str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
        with ExitStack() as watchers:
            watching = [watchers.enter_context(_watcher(file)) for file in files]
            stalls.recorded = all(watching)
            yield stalls
        if stalls.recorded:
            stalls.intervals = at_once([_late_wakings(file) for file in files])


def at_once(by_cpu: Sequence[Sequence[Interval]]) -> list[Interval]:
    """Returns the intervals that all CPUs have in common. Those of one CPU are in the order of time and do not overlap."""
    common = list(by_cpu[0])
    for others in by_cpu[1:]:
        both = ((max(a, begin), min(b, end)) for a, b in common for begin, end in others)
        common = [(begin, end) for begin, end in both if end > begin]
    return common


@contextmanager
def _watcher(file: Path) -> Iterator[bool]:
    """Watches the CPU of the file's name; provides whether it may be watched. Raises `TimeoutError`."""
    command = [sys.executable, "-I", "-S", __file__, file.name, str(file)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not file.exists() and process.poll() is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the process that watches CPU {file.name} for stalls did not start")
                time.sleep(INTERVAL_SECONDS)
            yield process.poll() is None
        finally:
            process.terminate()


def _late_wakings(file: Path) -> list[Interval]:
    lines = [line.split() for line in file.read_text().splitlines()]
    return [(float(due), float(woken)) for due, woken in lines]


def watch(cpu: int, file: Path, parent: int) -> None:
    """Appends a line `due woken` to `file` for each late waking, until the parent ends. Raises `PermissionError`."""
    os.sched_setaffinity(0, {cpu})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    with file.open("x", buffering=1) as late:
        while os.getppid() == parent:
            due = time.perf_counter() + INTERVAL_SECONDS
            time.sleep(INTERVAL_SECONDS)
            woken = time.perf_counter()
            if woken - due > LATE_SECONDS:
                late.write(f"{due!r} {woken!r}\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # which closes the file
    watch(int(sys.argv[1]), Path(sys.argv[2]), os.getppid())
