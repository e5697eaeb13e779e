"""A stand-in for `RanksProcess` that needs no torch: its ranks run until the test, or a request to end, ends them."""

from __future__ import annotations

import shutil
import socket
from typing import ClassVar

from counterpoint.transport.process.ranks.node import RanksOrder


class FakeRanks:
    """The ranks of one node in one round."""

    started: ClassVar[list[FakeRanks]] = []
    """All of them, in order; for the test to clear."""

    def __init__(self, order: RanksOrder, listener: socket.socket | None) -> None:
        self.order, self.has_store = order, listener is not None
        if listener is not None:
            listener.close()
        self.joined, self.succeeded = True, False
        self.node_rank: int | None = 0
        self.failure: str | None = None
        self.code: int | None = None
        FakeRanks.started.append(self)

    def poll(self) -> int | None:
        return self.code

    def succeed(self) -> None:
        self.succeeded, self.code = True, 0

    def fail(self, reason: str) -> None:
        self.failure, self.code = reason, 1

    def end(self, seconds: float) -> None:
        self.code = 143 if self.code is None else self.code
        self.close()

    def close(self) -> None:
        self.code = 137 if self.code is None else self.code
        shutil.rmtree(self.order.directory, ignore_errors=True)
