"""SIGTERM and SIGINT of the daemon: the first drains it. A second, or a drain beyond the timeout, ends it at once.

The timeout does not end a commit in progress, however long the disk takes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from counterpoint.run.loop_health.watchdog import describe_waits
from counterpoint.transport.process.notify import notify
from counterpoint.transport.process.stop_requests import StopSignals

logger = logging.getLogger(__name__)

_EXTENSION_SECONDS = 60.0
"""Extension requested from the supervisor, repeatedly, while a commit is awaited beyond the deadline."""


class ShutdownSignals:
    """Handles the signals during a block in the main thread. `wait` returns at the first signal."""

    def __init__(self, shutdown_timeout_seconds: float) -> None:
        self._timeout_seconds = shutdown_timeout_seconds
        self._signals = StopSignals(self._on_request)
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._deadline: threading.Timer | None = None
        self._exit_code = 1
        """The exit code if the deadline ends the process."""
        self._lock = threading.Lock()
        self._commits = 0
        """The commits in progress."""
        self._overdue = False
        """The deadline has passed, and a commit is awaited."""

    async def wait(self) -> None:
        """Waits for the first signal."""
        event = asyncio.Event()
        self._waiting = (asyncio.get_running_loop(), event)
        if not self._signals.count:
            await event.wait()

    @property
    def exit_code(self) -> int:
        """The exit code of a daemon that a signal ended early: 128 + the signal's number."""
        return self._signals.exit_code

    @contextmanager
    def commit_in_progress(self) -> Iterator[None]:
        """Marks a commit.

        A deadline that passes during the block does not end the process, and starts again after the block.
        """
        with self._lock:
            self._commits += 1
        try:
            yield
        finally:
            with self._lock:
                self._commits -= 1
                again, self._overdue = self._overdue and not self._commits, self._overdue and bool(self._commits)
            if again:
                _extend_timeout(_EXTENSION_SECONDS + self._timeout_seconds)
                self._begin_deadline(self._timeout_seconds)

    def end_in_time(self, exit_code: int) -> None:
        """Ends the process with `exit_code` unless it exits by itself within the timeout. Called when the work is over.

        The timeout counts from the signal, if there was one.
        """
        self._exit_code = exit_code
        if self._deadline is None:
            self._begin_deadline(self._timeout_seconds)

    def __enter__(self) -> ShutdownSignals:
        self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.__exit__(kind, error, trace)
        if self._deadline is not None:
            self._deadline.cancel()

    def _on_request(self, request: int, number: int) -> None:
        if request > 1:
            _exit_at_once(f"a second signal ({signal.Signals(number).name}): leaving at once", 128 + number)
        if self._deadline is None:
            self._begin_deadline(self._timeout_seconds)
        if self._waiting is not None:
            loop, event = self._waiting
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def _begin_deadline(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        # A thread, because the loop itself may be blocked.
        self._deadline = threading.Timer(seconds, self._on_deadline)
        self._deadline.daemon = True
        self._deadline.start()

    def _on_deadline(self) -> None:
        with self._lock:
            if not self._commits:
                self._give_up()
            self._overdue = True
            _extend_timeout(_EXTENSION_SECONDS)
            _print(
                f"warning: shutdown_timeout_seconds = {self._timeout_seconds:g} have passed, but a step is being committed: "
                f"waiting for {describe_waits()}"
            )
            self._begin_deadline(_EXTENSION_SECONDS / 2)

    def _give_up(self) -> None:
        running = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("environment"))
        threads = f" and for {len(running)} threads of environments ({running[0]}, ...)" if running else ""
        _exit_at_once(
            f"not ended within shutdown_timeout_seconds = {self._timeout_seconds:g}; still waiting for {describe_waits()}"
            f"{threads}. The last commit is intact",
            self._exit_code,
        )


def _exit_at_once(message: str, code: int) -> None:
    """Prints the message and ends the process from any thread. All commits are on disk."""
    _print(f"error: {message}")
    os._exit(code)


def _extend_timeout(seconds: float) -> None:
    """Asks the supervisor not to kill the process for `seconds` more."""
    notify(f"EXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}")


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
