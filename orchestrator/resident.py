"""How much memory this process has: its resident size, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Of this process, now. Raises `OSError` where there is no `/proc`."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
