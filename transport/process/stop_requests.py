"""Signals that ask a process to stop, counted as requests: one request may come as two signals.

`timeout 100 counterpoint run` sends its signal to the process and then to the group, which is the same process again; a terminal
that closes sends SIGHUP, and the end of its session SIGTERM. Two signals within a second are one request.
"""

from __future__ import annotations

import math
import time

REPETITION_SECONDS = 1.0


class StopRequests:
    """Counts requests. `note` may be called in a signal handler."""

    def __init__(self) -> None:
        self.count = 0
        self._noted = -math.inf

    def note(self, at: float | None = None) -> int:
        """Notes a signal that came at `at` seconds, now unless given; the number of the request that it is, or 0 for a repetition
        of the one before."""
        now = time.monotonic() if at is None else at
        if now - self._noted < REPETITION_SECONDS:
            return 0
        self._noted = now
        self.count += 1
        return self.count
