"""The supervisor's clock: seconds during which the supervisor itself ran.

A deadline that passed while the machine was suspended, its container frozen or the supervisor stopped is no evidence against
a worker: its messages could not be received, or it did not run either.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_GAP_SECONDS = 2.0
"""The most that counts between two reads."""


class RunningClock:
    """Counts the seconds during which it is read regularly.

    Read it more often than every `LONGEST_GAP_SECONDS`: a longer gap between two reads counts as that much.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._looked = now()
        self._ran = 0.0

    def read(self) -> float:
        """Returns seconds since an arbitrary moment; never falls."""
        now = self._now()
        self._ran += min(now - self._looked, LONGEST_GAP_SECONDS)
        self._looked = now
        return self._ran


class JobClock:
    """The clock of a job: seconds that go on where the last master's ended, and never step back.

    It counts on from the last state that was written. Read it more often than every two seconds, as `RunningClock` says.
    """

    def __init__(self, start: float) -> None:
        self._start = start
        self._clock = RunningClock()
        self._began = self._clock.read()

    def read(self) -> float:
        """Returns the job's seconds."""
        return self._start + self._clock.read() - self._began
