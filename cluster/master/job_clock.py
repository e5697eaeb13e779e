"""The clock of a job: seconds that go on where the last master's ended, and never step back."""

from __future__ import annotations

from cluster.clock import RunningClock


class JobClock:
    """Counts on from the last event of the journal. Read it more often than every two seconds, as `RunningClock` says."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._clock = RunningClock()
        self._began = self._clock.read()

    def read(self) -> float:
        """Returns the job's seconds."""
        return self._start + self._clock.read() - self._began
