"""How long a full batch may wait for stragglers: so many steps of the length that the newest ones had without such waits."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

_TIMED_STEPS = 8
"""A step is as long as the mean of so many."""


class Patience:
    """Times the steps of one run, and one wait at a time. `ended` is called on the loop, with the step, when a wait is over."""

    def __init__(self, ended: Callable[[int], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is in seconds."""
        self._ended = ended
        self._clock = clock
        self._began = clock()
        self._seconds: deque[float] = deque(maxlen=_TIMED_STEPS)
        """How long the newest batches took to be full."""
        self._wait: asyncio.TimerHandle | None = None
        self._waited = False

    def wait(self, step: int, steps: int) -> None:
        """Begins the wait of the full batch of `step`, for `steps` steps at most."""
        self._full()
        self._waited = True
        seconds = steps * statistics.fmean(self._seconds)
        self._wait = asyncio.get_running_loop().call_later(seconds, self._end, step, seconds)

    def shipped(self) -> None:
        """Begins the next step: its batch has shipped."""
        self.cancel()
        if not self._waited:
            self._full()
        self._began, self._waited = self._clock(), False

    def cancel(self) -> None:
        """Ends the wait, if there is one, without a call of `ended`."""
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None

    def _full(self) -> None:
        self._seconds.append(self._clock() - self._began)

    def _end(self, step: int, seconds: float) -> None:
        self._wait = None
        logger.warning(
            "the batch of step %d has waited %.1f s for stragglers, as schedule.straggler_patience_steps allows. It ships "
            "without them, and those that are then too old are dropped. A larger schedule.max_off_policy_steps keeps them",
            step, seconds,
        )  # fmt: skip
        self._ended(step)
