"""The order of one model's requests: by `seq_id`, not by arrival, each once. Pure: no I/O and no clock.

The SDK numbers the requests of a model from 1 without gaps, sends the first part of a large one last, and repeats unanswered
requests.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Request = TypeVar("Request")

FARTHEST = 2**20
"""How far ahead a request may be that must come again later. A client that sends more at once must send all of them again,
too."""


class TooEarly(ValueError):
    """A request too far ahead of the next one."""


class Sequence(Generic[Request]):
    """The requests of one model."""

    def __init__(self, done: int = 0, most_waiting: int = 1024) -> None:
        """Begins after request `done`. At most `most_waiting` numbers may be ahead of a missing one."""
        self.done = done
        """The last request that `offer` returned."""
        self._most = most_waiting
        self._waiting: dict[int, tuple[Request, float]] = {}

    def offer(self, seq_id: int, request: Request, now: float) -> list[tuple[int, Request]]:
        """Takes a request, and returns the requests that are due by it, in order.

        A repetition of a known one changes nothing. Raises `TooEarly`, and `ValueError` for a number that no request can have.
        """
        if not 1 <= seq_id <= self.done + FARTHEST:
            raise ValueError(f"seq_id = {str(seq_id)[:40]}; they count from 1 without gaps, and {self.done} have come")
        if seq_id > self.done + self._most:
            raise TooEarly(f"seq_id = {seq_id}, and request {self.done + 1} is still missing")
        if seq_id > self.done:
            self._waiting.setdefault(seq_id, (request, now))
        due: list[tuple[int, Request]] = []
        while (found := self._waiting.pop(self.done + 1, None)) is not None:
            self.done += 1
            due.append((self.done, found[0]))
        return due

    def knows(self, seq_id: int) -> bool:
        """Whether it has a request of this number."""
        return 1 <= seq_id <= self.done or seq_id in self._waiting

    def waits(self, seq_id: int) -> bool:
        """Whether it has a request of this number that waits for an earlier one."""
        return seq_id in self._waiting

    def misses(self, seq_id: int) -> bool:
        """Whether its requests wait for this one: they would for ever if it were refused."""
        return seq_id == self.done + 1 and bool(self._waiting)

    def forget(self, seq_id: int) -> None:
        """Forgets a request that waits: it may come again."""
        self._waiting.pop(seq_id, None)

    @property
    def is_new(self) -> bool:
        """Whether it has no request yet."""
        return self.done == 0 and not self._waiting

    def overdue(self, before: float) -> list[int]:
        """Returns and forgets the requests that have waited since before this time for a missing one, ascending."""
        late = sorted(number for number, (_, since) in self._waiting.items() if since < before)
        for number in late:
            del self._waiting[number]
        return late
