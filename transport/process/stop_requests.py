"""Requests to stop that come as signals: counted, since one request may come as two signals, and handled in the main thread.

`timeout 100 counterpoint run` sends its signal to the process and then to the group, which is the same process again; a terminal
that closes sends SIGHUP, and the end of its session SIGTERM. Two signals within a second are one request.

`counterpoint/job/sweep/worker.py` counts requests here but handles signals in its event loop, since its handlers change the
loop's state. So does a job's master, which counts in `counterpoint/cluster/manager/ending.py`.
`counterpoint/sweep/interruption.py` turns signals into exceptions, and imports nothing of ours.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

REPETITION_SECONDS = 1.0
"""Signals less than this apart are one request."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequests:
    """Counts requests. `note` may be called in a signal handler."""

    def __init__(self) -> None:
        self.count = 0
        self._noted = -math.inf

    def note(self, at: float | None = None) -> int:
        """Notes a signal that came at `at` seconds of the monotonic clock, now unless given.

        Returns the number of its request, counted from 1, or 0 for a repetition of the one before.
        """
        now = time.monotonic() if at is None else at
        if now - self._noted < REPETITION_SECONDS:
            return 0
        self._noted = now
        self.count += 1
        return self.count


class StopSignals:
    """Takes SIGTERM and SIGINT as stop requests inside its block, in the main thread; then restores the former handlers.

    The handlers are plain `signal.signal` ones, as uvicorn's: they also run while no event loop does.
    """

    def __init__(self, on_request: Callable[[int, int], object] = lambda request, number: None) -> None:
        """`on_request` is called in the handler for each request, with the request's number, from 1, and the signal's."""
        self.exit_code = 0
        """128 + the number of the first signal: for a process that it ended before its work was complete."""
        self._requests = StopRequests()
        self._on_request = on_request
        self._former: dict[int, Any] = {}

    @property
    def count(self) -> int:
        """The number of requests so far."""
        return self._requests.count

    def __enter__(self) -> Self:
        self._former = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if request := self._requests.note():
            self.exit_code = self.exit_code or 128 + number
            self._on_request(request, number)


@contextmanager
def interrupted_in_order() -> Iterator[None]:
    """Ends its block by an exception at SIGTERM, SIGINT or SIGHUP, in the main thread, so that each `finally` in it runs.

    That is `KeyboardInterrupt` for SIGINT, else `SystemExit` with 128 + the signal's number; a later request raises again. A
    signal that is ignored, as SIGHUP is below `nohup`, stays so.
    """
    requests = StopRequests()

    def handle(number: int, frame: FrameType | None) -> None:
        if requests.note():
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    former = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGHUP)}
    heeded = {number: handler for number, handler in former.items() if handler is not signal.SIG_IGN}
    try:
        for number in heeded:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)


def end_at_second_request(request: int, number: int) -> None:
    """Ends the process, for `StopSignals`, from the second request on, as if the signal were not handled."""
    if request > 1:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        os._exit(128 + number)  # the first process of a container: the kernel has dropped the signal
