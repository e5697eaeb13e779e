"""Measures this process's resident memory, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Returns the present resident bytes. Raises `OSError` without `/proc`."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def peak_bytes() -> int:
    """Returns the largest number of resident bytes so far. Raises `OSError` without `/proc`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
