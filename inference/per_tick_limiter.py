"""Lets a few through in each pass of the event loop, in the order of coming, however many come at once.

What hundreds do in one pass holds up all else for as long as they take together; in passes of a few each, timers and other
callbacks have their turn in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class PerTickLimiter:
    """Lets `per_tick` through in one pass."""

    def __init__(self, per_tick: int) -> None:
        self._per_tick = per_tick
        self._left = per_tick
        """How many may still go through in this pass; renewed by `_next_tick`, which is scheduled whenever it is less."""
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self) -> bool:
        """Whether the caller may go on in this pass; if not, let it `wait`."""
        if not self._left:
            return False
        if self._left == self._per_tick:
            asyncio.get_running_loop().call_soon(self._next_tick)
        self._left -= 1
        return True

    def wait(self, action: Callable[[], None]) -> None:
        """Calls `action` in the pass in which its turn comes. After a `take` that failed."""
        self._waiting.append(action)

    def _next_tick(self) -> None:
        admitted = min(self._per_tick, len(self._waiting))
        self._left = self._per_tick - admitted
        if admitted:
            asyncio.get_running_loop().call_soon(self._next_tick)
        for _ in range(admitted):
            self._waiting.popleft()()
