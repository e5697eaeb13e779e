"""Named points at which a test kills the master: `CLUSTER_FAULT=after_write:17` is a SIGKILL after the 17th write of the state.

Only for tests of what a master's death does: each point is one between an effect and what must follow from it.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "CLUSTER_FAULT"

POINTS = ("before_write", "after_write", "before_instruction", "after_instruction", "before_outcome", "after_outcome")


class Faults:
    """Counts how often each point was reached, in one master."""

    def __init__(self, fault: str | None = None) -> None:
        """Takes `point:number`; without it, that of the environment, if any. Raises `ValueError` for an unknown point."""
        text = os.environ.get(VARIABLE, "") if fault is None else fault
        point, _, number = text.partition(":")
        if text and (point not in POINTS or not number.isdecimal()):
            raise ValueError(f"{VARIABLE}={text!r}: expected one of {', '.join(POINTS)}, a colon, and a number")
        self._fault = (point, int(number)) if text else None
        self.reached: Counter[str] = Counter()

    def reach(self, point: str) -> None:
        """Kills this process if it is the fault's turn."""
        self.reached[point] += 1
        if self._fault == (point, self.reached[point]):
            self.kill()

    def kill(self) -> None:
        """Ends the process as an out-of-memory kill does."""
        os.kill(os.getpid(), signal.SIGKILL)
