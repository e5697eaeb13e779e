"""Measures the resident memory of a process, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int | None = None) -> int:
    """Returns the present resident bytes of this process, or of another. Raises `OSError` without `/proc`, or if it has ended."""
    return int(Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES


def peak_bytes() -> int:
    """Returns the largest number of resident bytes of this process so far. Raises `OSError` without `/proc`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
