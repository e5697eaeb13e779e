"""Measures how much CPU other processes use while a benchmark runs, to decide whether its bounds on time count.

It uses the kernel's counters of the whole machine, of this process, and of its descendants, both ended and living. An ended one
whose parent did not wait for it, as Ray's do not, counts as another process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from counterpoint.transport.process.launch import descendants

TOO_NOISY = 0.1
"""Largest share of the machine's CPU that other processes may use; above it, a broken bound on time does not count."""

SETTLING_SECONDS = 5.0
"""Longest wait for a machine that is late with nothing to do."""

LATE_SECONDS = 0.005
"""A sleeping thread that wakes so much later than it asked for is late."""

_JIFFIES_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds since the machine, or this process, started."""

    total: float
    """The time of all cores, idle time included."""
    busy: float
    """The time in processes and in other virtual machines."""
    ours: float
    """The time in this process and its descendants."""

    @classmethod
    def now(cls, without: int | None = None) -> CpuTimes:
        """Reads the counters; what runs below process `without` is not ours. Raises `OSError` where there is no `/proc`."""
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, _, _, _, _, stolen = fields
        return cls(
            total=sum(fields) / _JIFFIES_A_SECOND,
            busy=(user + nice + system + stolen) / _JIFFIES_A_SECOND,
            ours=sum(cpu_seconds(pid, with_ended=True) for pid in (os.getpid(), *below_this(without))),
        )

    def share_of_others(self, before: CpuTimes) -> float:
        """Returns the share of the machine's CPU time since `before` that other processes took, from 0 to 1."""
        total = self.total - before.total
        others = (self.busy - before.busy) - (self.ours - before.ours)
        return min(1.0, max(0.0, others / total)) if total > 0 else 0.0


def below_this(without: int | None = None) -> set[int]:
    """Returns the descendants of this process but process `without` and those below it."""
    left_out = set() if without is None else {without, *descendants(without)}
    return set(descendants(os.getpid())) - left_out


def cpu_seconds(pid: int, with_ended: bool = False) -> float:
    """Returns the CPU seconds of a process until now, `with_ended` also of those that it has waited for; 0 if it has ended."""
    with suppress(OSError):
        # After the name, which may hold anything, comes the third field; utime, stime, cutime and cstime begin at the 14th.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return sum(map(int, fields[11 : 15 if with_ended else 13])) / _JIFFIES_A_SECOND
    return 0.0


def settle(seconds: float = SETTLING_SECONDS) -> bool:
    """Waits until a thread that sleeps a millisecond at a time has woken in time for a second; returns whether it did.

    After `seconds` it gives up. A virtual machine that gives freed memory back to its host stops for 10 to 100 ms at a time while
    it does, and that is some seconds after a process with gigabytes has ended.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        until, late = time.monotonic() + 1.0, 0.0
        while (began := time.monotonic()) < until:
            time.sleep(0.001)
            late = max(late, time.monotonic() - began - 0.001)
        if late < LATE_SECONDS:
            return True
    return False


@dataclass(slots=True)
class Noise:
    """The result of `measured_noise`, set once its block has ended."""

    share: float = 0.0
    """The share of the machine's CPU that other processes took, from 0 to 1."""


@contextmanager
def measured_noise() -> Iterator[Noise]:
    """Measures the noise of the block."""
    noise, before = Noise(), CpuTimes.now()
    yield noise
    noise.share = CpuTimes.now().share_of_others(before)
