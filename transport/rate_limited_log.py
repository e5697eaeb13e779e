"""A log that is limited in rate, so that a flood of messages or of bad rows cannot fill the disk.

The trainer's end of the wire has one (`transport/wires/receiver.py`), and so have the trainer's sessions
(`counterpoint/trainer/work/sessions.py`).
"""

from __future__ import annotations

import logging
import math
import time

_LINES, _WINDOW_SECONDS = 10, 10.0
"""Most lines in each window, and the window's length."""


class RateLimitedLog:
    """Logs to `logger` while a window of time has room.

    Counts the other lines, and logs their number when the next window begins.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._since, self._noted = -math.inf, 0

    def note(self, level: int, line: str) -> None:
        """Logs the line, or counts it."""
        now = time.monotonic()
        if now - self._since >= _WINDOW_SECONDS:
            if self._noted > _LINES:
                self._logger.warning("%d further lines were left out", self._noted - _LINES)
            self._since, self._noted = now, 0
        self._noted += 1
        if self._noted <= _LINES:
            self._logger.log(level, "%s", line)
