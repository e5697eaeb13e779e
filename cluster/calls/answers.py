"""What a server remembers of calls, so that one that is sent again does not run again: pure, and bounded.

A call that still runs is answered once, to where its caller now is. The answers to idempotent methods, the only ones whose
calls are sent again, are kept for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from counterpoint.transport.files.atomic import Buffer, as_bytes_view

Key = tuple[bytes, int]
"""Caller and number."""

KEPT_ANSWERS, KEPT_BYTES = 256, 16 * 2**20
"""Most answers kept, and most bytes of them. A larger answer is not kept: its method runs again, which does no harm."""


class Answers:
    """The calls that run, and the latest answers."""

    def __init__(self) -> None:
        self._running: dict[Key, bytes] = {}
        self._kept: OrderedDict[Key, tuple[Sequence[Buffer], int]] = OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        """How many calls run, or wait to run."""
        return len(self._running)

    def begin(self, key: Key, sender: bytes) -> Sequence[Buffer] | bool:
        """Returns the answer if there is one, else whether the call is new and is to be run."""
        if (kept := self._kept.get(key)) is not None:
            return kept[0]
        new = key not in self._running
        self._running[key] = sender
        return new

    def end(self, key: Key, answer: Sequence[Buffer] | None, keep: bool) -> bytes:
        """Notes the answer of a call, None if it was dropped; returns the connection to send it to, by now perhaps another."""
        sender = self._running.pop(key)
        if answer is None:
            return sender
        size = sum(as_bytes_view(frame).nbytes for frame in answer)
        if keep and size <= KEPT_BYTES:
            self._kept[key] = (answer, size)
            self._kept_bytes += size
            while len(self._kept) > KEPT_ANSWERS or self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= self._kept.popitem(last=False)[1][1]
        return sender
