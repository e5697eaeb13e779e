"""Measures the resident memory of a process, as the kernel counts it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int | None = None) -> int:
    """Returns the present resident bytes of this process, or of another. Raises `OSError` without `/proc`, or if it has ended."""
    return int(Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES


def available_bytes() -> int | None:
    """Returns how many bytes of memory the machine and this process's cgroup have available; None if that is unknown."""
    found: list[int] = []
    with suppress(OSError):
        meminfo = Path("/proc/meminfo").read_text()
        found += [int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # "max" is no limit; a cgroup of version 1 has no such file
        cgroup = Path("/sys/fs/cgroup")
        found.append(int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text()))
    return min(found, default=None)


def peak_bytes() -> int:
    """Returns the largest number of resident bytes of this process so far. Raises `OSError` without `/proc`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
