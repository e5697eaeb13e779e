"""Limits how many callers continue in one tick of the event loop (one pass over its callbacks), first come, first served.

What hundreds do in one tick blocks all others for as long as they take together; in ticks of a few each, timers and other
callbacks run in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial


class PerTickLimiter:
    """Lets `per_tick` callers continue in one tick."""

    def __init__(self, per_tick: int) -> None:
        self._per_tick = per_tick
        self._left = per_tick
        """How many may still continue in this tick; renewed by `_next_tick`, which is scheduled whenever it is less."""
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self) -> bool:
        """Whether the caller may continue in this tick; if not, call `wait`."""
        if not self._left:
            return False
        if self._left == self._per_tick:
            asyncio.get_running_loop().call_soon(self._next_tick)
        self._left -= 1
        return True

    def wait(self, action: Callable[[], None]) -> None:
        """Calls `action` in a later tick, in order. Call it after a `take` that failed."""
        self._waiting.append(action)

    async def turn(self) -> None:
        """Returns once the caller may continue: at once, or in a later tick, in order."""
        if not self.take():
            turn = asyncio.get_running_loop().create_future()
            self.wait(partial(_end, turn))
            await turn

    def _next_tick(self) -> None:
        admitted = min(self._per_tick, len(self._waiting))
        self._left = self._per_tick - admitted
        if admitted:
            asyncio.get_running_loop().call_soon(self._next_tick)
        for _ in range(admitted):
            self._waiting.popleft()()


def _end(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # its caller was cancelled
        turn.set_result(None)
