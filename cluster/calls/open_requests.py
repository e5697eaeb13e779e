"""The calls of a process that have not ended, and which of them reaches its deadline next: for the caller's thread alone."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from cluster.calls.request import Request

_SPARE = 1024
"""Deadlines of ended calls that are kept beside as many as there are open calls, so that sorting them out is rare."""


class OpenRequests:
    """The calls, by number."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __iter__(self) -> Iterator[Request]:
        return iter([*self._requests.values()])

    @property
    def due(self) -> float:
        """When the next deadline passes, by the monotonic clock; never before an open call's."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def add(self, request: Request) -> None:
        """Takes a call."""
        self._requests[request.number] = request
        heapq.heappush(self._deadlines, (request.deadline, request.number))

    def drop(self, request: Request) -> None:
        """Forgets a call that has ended."""
        self._requests.pop(request.number, None)
        if len(self._deadlines) > 2 * len(self._requests) + _SPARE:
            self._deadlines = [(kept.deadline, number) for number, kept in self._requests.items()]
            heapq.heapify(self._deadlines)

    def take_late(self, now: float) -> Iterator[Request]:
        """Yields the calls whose deadline has passed; they are no longer open."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            if (request := self._requests.pop(number, None)) is not None:
                yield request
