"""What peers do, in the log: a flood of it must not fill the disk.

The trainer's end has one (`transport/wires/receiver.py`), and so has what the trainer makes of the messages
(`trainer/runs/sessions.py`).
"""

from __future__ import annotations

import logging
import math
import time

_LINES, _WINDOW_SECONDS = 10, 10.0
"""At most so many lines in so many seconds."""


class RateLimitedLog:
    """Logs to `logger` as far as a window of time has room for it; the rest is counted, and said when the next one begins."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._since, self._noted = -math.inf, 0

    def note(self, level: int, line: str) -> None:
        """Logs the line, or counts it."""
        now = time.monotonic()
        if now - self._since >= _WINDOW_SECONDS:
            if self._noted > _LINES:
                self._logger.warning("%d further lines about what peers did were left out", self._noted - _LINES)
            self._since, self._noted = now, 0
        self._noted += 1
        if self._noted <= _LINES:
            self._logger.log(level, "%s", line)
