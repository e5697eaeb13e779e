"""A polite request to stop: the first SIGTERM or SIGINT is noted for the loop to see, a second one ends the process at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

from transport.process.stop_requests import StopRequests

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """A context manager, for the main thread; restores the former handlers at its end."""

    def __init__(self) -> None:
        self._requests = StopRequests()
        self.requested = False
        self.exit_code = 0
        """Of a process that the signal ended before its work was complete: 128 + its number."""
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        request = self._requests.note()
        if request == 1:
            self.requested = True
            self.exit_code = 128 + number
        elif request > 1:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
