"""Hands work to a thread that waits for sockets: a queue, and a descriptor that becomes readable."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator

Work = Callable[[], None]


class Waker:
    """The queue. Any thread may `post`; only the one that waits may `take`."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queue: deque[Work] = deque()

    def post(self, work: Work) -> None:
        """Queues work. Must not be called after `close`."""
        self._queue.append(work)
        os.eventfd_write(self.descriptor, 1)

    def take(self) -> Iterator[Work]:
        """Yields what is queued."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return  # nothing was posted since
        while self._queue:
            yield self._queue.popleft()

    def close(self) -> None:
        """Frees the descriptor."""
        os.close(self.descriptor)
