"""What the exit code of a process says."""

from __future__ import annotations

import re
import signal

from counterpoint.transport.process.permanent_errors import DISK_FULL

ASKED_TO_END = frozenset({128 + signal.SIGINT, 128 + signal.SIGTERM})
"""Exit codes of a process that a signal ended before its work was complete: it ended in order, or, if it had no handler yet, the
kernel ended it."""


_HOW = re.compile(r"(exit code \d+|sys\.exit\(\d+\)|by SIG[A-Z0-9]+)$")
"""The end of words that say how a process ended and not why."""


def describe_exit(code: int) -> str:
    """Describes an exit code, for a person."""
    if code == DISK_FULL:
        return f"ended with exit code {code}: the disk is full"
    if code <= 128:
        return f"ended with exit code {code}"
    try:
        return f"was {'stopped' if code in ASKED_TO_END else 'killed'} by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"ended with exit code {code}"


def is_explained(death: str) -> bool:
    """Whether the words about the end of a process have its reason, behind what the exit code says."""
    return ": " in death and _HOW.search(death) is None
