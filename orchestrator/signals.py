"""SIGTERM and SIGINT of the daemon: the first asks it to drain; a second, or an end that takes too long, ends it at once.

Handlers are plain `signal.signal` ones, restored on exit, as uvicorn does it: they also run where a loop has no
`add_signal_handler` or is about to start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from orchestrator.watchdog import describe_waits
from transport.requests_to_stop import RequestsToStop

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """A context manager, for the main thread. `wait` returns once a signal has come."""

    def __init__(self, shutdown_timeout_seconds: float) -> None:
        self._timeout_seconds = shutdown_timeout_seconds
        self._requests = RequestsToStop()
        self._received: int | None = None
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._deadline: threading.Timer | None = None
        self._exit_code = 1
        """Of an end that takes too long."""
        self._former: dict[int, Any] = {}

    async def wait(self) -> None:
        """Until the first signal."""
        event = asyncio.Event()
        self._waiting = (asyncio.get_running_loop(), event)
        if self._received is None:
            await event.wait()

    @property
    def exit_code(self) -> int:
        """Of a daemon that the signal ended before its run was done: 128 + its number."""
        return 128 + (self._received or 0)

    def end_in_time(self, exit_code: int) -> None:
        """The work is over, and the process would end with `exit_code`: sees to it that it does so within the timeout, which runs
        from the signal where there was one."""
        self._exit_code = exit_code
        if self._deadline is None:
            self._begin_deadline()

    def __enter__(self) -> StopSignals:
        self._former = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._deadline is not None:
            self._deadline.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        request = self._requests.note()
        if request == 0:
            return
        if request > 1:
            _leave(f"a second signal ({signal.Signals(number).name}): leaving at once", 128 + number)
        self._received = number
        if self._deadline is None:
            self._begin_deadline()
        if self._waiting is not None:
            loop, event = self._waiting
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def _begin_deadline(self) -> None:
        # A thread, since what keeps the daemon from ending may well be a loop that does not run.
        self._deadline = threading.Timer(self._timeout_seconds, self._too_late)
        self._deadline.daemon = True
        self._deadline.start()

    def _too_late(self) -> None:
        running = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("environment"))
        threads = f" and for {len(running)} threads of environments ({running[0]}, ...)" if running else ""
        _leave(
            f"not ended within shutdown_timeout_seconds = {self._timeout_seconds:g}; still waiting for {describe_waits()}"
            f"{threads}. The last commit is intact",
            self._exit_code,
        )


def _leave(message: str, code: int) -> None:
    """Ends the process from any thread, whatever the others do. What is committed is on disk."""
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    os._exit(code)
