"""SIGTERM and Ctrl-C while targets run: an exception, but only in a body or in a wait, where it can be handled.

Elsewhere a claim is being made or ended; a signal waits until that is done, so that the worker gives back every claim that
it can. A signal that the program handles itself is passed on at once, and noted: an exception that ends a body is an
interruption only after a stop request.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

DEFAULTS: dict[signal.Signals, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
"""The default handlers, which are replaced. An ignored signal stays ignored."""

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Stop requests. The program's own handler for one is still called, and the signal is noted."""


class Interruptions:
    """Watches the signals while its block runs in the main thread; in another thread it does nothing."""

    def __init__(self, takes_over: bool = True) -> None:
        """Replaces the default handlers, too, with `takes_over`, so that a signal interrupts only where it may."""
        self._takes_over = takes_over
        self._received: int | None = None
        self._passed_on = False
        self._interruptible = False
        self._replaced: dict[signal.Signals, tuple[Any, Any]] = {}
        """The former handler of each signal, and ours."""

    def __enter__(self) -> Interruptions:
        if threading.current_thread() is threading.main_thread():
            for number in PASSED_ON:
                before = signal.getsignal(number)
                ours: Any = self._passing_on_to(before) if callable(before) else None
                if self._takes_over and before is DEFAULTS.get(number):
                    ours = self._handle
                if ours is not None:
                    signal.signal(number, ours)
                    self._replaced[number] = (before, ours)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, (before, ours) in self._replaced.items():
            if signal.getsignal(number) == ours:  # else the program has set another meanwhile
                signal.signal(number, before)

    def caused(self, error: BaseException, may_be_closed: bool = True) -> bool:
        """Whether a body that ended with this exception was interrupted by a stop request to its worker.

        Otherwise the body has failed, for example by a `sys.exit` of its own, or as it awaited a task that it had cancelled.
        `may_be_closed`: whether the body may be in a generator or coroutine that is being closed, which `GeneratorExit` then
        shows.
        """
        if isinstance(error, Exception):
            return False
        if self._passed_on or self._received is not None:
            return True
        if isinstance(error, GeneratorExit):
            return may_be_closed
        if isinstance(error, asyncio.CancelledError):
            return _is_cancelled()
        return isinstance(error, KeyboardInterrupt) and self._may_be_ctrl_c()

    def _may_be_ctrl_c(self) -> bool:
        """Whether a `KeyboardInterrupt` may come from a SIGINT that was not noted, since another handler than ours is set."""
        if threading.current_thread() is not threading.main_thread():  # no other thread gets signals
            return False
        return (
            signal.SIGINT not in self._replaced or signal.getsignal(signal.SIGINT) != self._replaced[signal.SIGINT][1]
        )

    def check(self) -> None:
        """Raises if a signal arrived that could not be raised then."""
        if self._received is not None:
            _raise(self._received)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raises in its block, too: `SystemExit` with 143 for SIGTERM, `KeyboardInterrupt` for Ctrl-C."""
        try:
            self._interruptible = True
            self.check()
            yield
        finally:
            self._interruptible = False

    def sleep(self, seconds: float) -> None:
        """Sleeps; raises as `interruptible` does."""
        with self.interruptible():
            time.sleep(seconds)

    def _passing_on_to(self, handler: Any) -> Any:
        def note(number: int, frame: FrameType | None) -> None:
            self._passed_on = True
            handler(number, frame)

        return note

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if self._interruptible:
            _raise(number)


def running_task() -> asyncio.Task[Any] | None:
    """Returns the task that runs in this thread; None without one, or without a loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _is_cancelled() -> bool:
    """Whether somebody has asked for the cancellation of the running task, if one runs."""
    task = running_task()
    return task is not None and task.cancelling() > 0


def _raise(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
