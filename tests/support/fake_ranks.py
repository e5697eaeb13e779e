"""A stand-in for `RanksProcess` that needs no torch: its ranks run until the test, or a request to end, ends them."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from dataclasses import replace
from typing import ClassVar

from counterpoint.transport.process.notify import NotifySocket, notify
from counterpoint.transport.process.ranks.node import RanksOrder, RanksProcess


class FakeRanks(RanksProcess):
    """The ranks of one node in one round; the test speaks for them."""

    started: ClassVar[list[FakeRanks]] = []
    """All of them, in order; for the test to clear."""

    def __init__(self, order: RanksOrder, listener: socket.socket | None) -> None:
        self.order, self.has_store = replace(order), listener is not None
        if listener is not None:
            listener.close()
        self.said, self.began, self._lock = {"X_NODE_RANK": ("0", 0.0)}, time.monotonic(), threading.Lock()
        self._notifications: NotifySocket | None = NotifySocket()
        self.failure: str | None = None
        self.ended: int | None = None
        """The exit code, once they have ended."""
        FakeRanks.started.append(self)

    @property
    def code(self) -> int | None:
        return self.ended

    def says(self, *lines: str) -> None:
        """Rank 0 speaks."""
        assert self._notifications is not None
        os.environ["NOTIFY_SOCKET"] = self._notifications.address
        for line in lines:
            assert notify(line)

    def poll(self) -> int | None:
        self.hear()
        return self.code

    def succeed(self) -> None:
        self.ended = 0

    def fail(self, reason: str) -> None:
        self.failure, self.ended = reason, 1

    def end(self, seconds: float) -> None:
        self.ended = 143 if self.ended is None else self.ended
        self.close()

    def close(self) -> None:
        self.ended = 137 if self.ended is None else self.ended
        with self._lock:
            notifications, self._notifications = self._notifications, None
        if notifications is not None:
            notifications.close()
        shutil.rmtree(self.order.directory, ignore_errors=True)
