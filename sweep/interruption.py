"""SIGTERM and Ctrl-C while targets run: an exception, but only where it can be put in order, in a body or in a wait.

Between those a claim is being made or ended; a signal waits until that is done, so that no claim is left behind by a worker
that could have given it back.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

DEFAULTS: dict[signal.Signals, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
"""The handlers that are replaced. One that the program has set, or a signal that is ignored, is left as it is."""


class Interruptions:
    """Takes the signals over for as long as its block runs, in the main thread; in any other it does nothing."""

    def __init__(self) -> None:
        self._asked: int | None = None
        self._heeding = False
        self._replaced: list[signal.Signals] = []

    def __enter__(self) -> Interruptions:
        if threading.current_thread() is threading.main_thread():
            for number, default in DEFAULTS.items():
                if signal.getsignal(number) is default:
                    signal.signal(number, self._handle)
                    self._replaced.append(number)
        return self

    def __exit__(self, *exception: object) -> None:
        for number in self._replaced:
            signal.signal(number, DEFAULTS[number])

    def check(self) -> None:
        """Raises if a signal came that could not be heeded then."""
        if self._asked is not None:
            _raise(self._asked)

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Raises in its block, too: `SystemExit` with 143 for SIGTERM, `KeyboardInterrupt` for Ctrl-C."""
        try:
            self._heeding = True
            self.check()
            yield
        finally:
            self._heeding = False

    def rest(self, seconds: float) -> None:
        """Sleeps; raises as `heeded`."""
        with self.heeded():
            time.sleep(seconds)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
        if self._heeding:
            _raise(number)


def _raise(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
