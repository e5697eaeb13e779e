"""How long a full batch may wait for stragglers: a number of steps of the length that steps have without such waits.

After a wait later batches are full at once. The time until a batch is full is thus no measure if many wait: a step is at least
as long as the trainer's.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

_TIMED_STEPS = 8
"""The newest steps for the mean or median length of a step."""


class Timer(Protocol):
    """The handle that `call_later` returns."""

    def cancel(self) -> None:
        """Prevents the call."""


def _call_later(seconds: float, call: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, call)


class BatchPatience:
    """Times the steps of one run, and one wait at a time. Calls `ended` with the step and its seconds when a wait is over."""

    def __init__(
        self,
        ended: Callable[[int, float], object],
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], Timer] = _call_later,
    ) -> None:
        """`clock` is in seconds, and so is the first argument of `call_later`."""
        self._ended = ended
        self._clock = clock
        self._call_later = call_later
        self._seconds: deque[float] = deque(maxlen=_TIMED_STEPS)
        """How long the newest batches took to be full."""
        self._trainer: deque[float] = deque(maxlen=_TIMED_STEPS)
        """How long the trainer took for each of the newest steps, until its weights were loaded."""
        self._began = clock()
        self._version: int | None = None
        self._loaded_at = 0.0
        self._shipped_at: dict[int, float] = {}
        """The steps without loaded weights yet."""
        self._wait: Timer | None = None
        self._waited = False

    def loaded(self, version: int) -> None:
        """The weights after step `version` are loaded. The first ones begin the first step."""
        now = self._clock()
        if self._version is None:
            self._began = now
        elif trained := [step for step in self._shipped_at if step <= version]:
            began = max(self._loaded_at, self._shipped_at[trained[0]])
            self._trainer.append((now - began) / len(trained))
            for step in trained:
                del self._shipped_at[step]
        self._version, self._loaded_at = version, now

    @property
    def trainer_seconds(self) -> float:
        """Seconds that the trainer takes for a step. Before its first one has ended, the seconds so far."""
        if self._trainer:
            return statistics.median(self._trainer)
        first = min(self._shipped_at.values(), default=None)
        return 0.0 if first is None else self._clock() - max(first, self._loaded_at)

    def wait(self, step: int, steps: int) -> None:
        """Begins the wait of the full batch of `step`, for `steps` steps at most."""
        self._full()
        self._waited = True
        self._look(step, steps, self._clock(), -1.0)

    def shipped(self, step: int) -> None:
        """Begins the next step: the batch of `step` has shipped."""
        self.cancel()
        if not self._waited:
            self._full()
        self._began, self._waited = self._clock(), False
        self._shipped_at[step] = self._began

    def cancel(self) -> None:
        """Ends the wait, if there is one, without a call of `ended`."""
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None

    def _full(self) -> None:
        self._seconds.append(self._clock() - self._began)

    def _look(self, step: int, steps: int, since: float, seconds: float) -> None:
        """Ends the wait after `seconds`, or goes on if steps turned out to be longer."""
        longest = steps * max(statistics.fmean(self._seconds), self.trainer_seconds)
        if longest > seconds:
            left = max(0.0, since + longest - self._clock())
            self._wait = self._call_later(left, lambda: self._look(step, steps, since, longest))
            return
        self._wait = None
        self._ended(step, seconds)
