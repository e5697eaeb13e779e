"""Limits how many callers continue in one tick of the event loop (one pass over its callbacks), first come, first served.

What hundreds do in one tick blocks all others for as long as they take together; in ticks of a few each, timers and other
callbacks run in between. What a caller does takes a tenth of a millisecond on one machine and half of one on another, and several
limiters and much else share a tick. So those of a loop let fewer continue after a tick that computed for long.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

TICK_SECONDS = 0.001
"""CPU seconds of a tick after which fewer callers continue in the next one."""

_LEAST_SHARE = 0.25


class PerTickLimiter:
    """Lets `per_tick` callers continue in one tick, and after long ones fewer, but at least one."""

    def __init__(self, per_tick: int, *, paced: bool = True) -> None:
        """Without `paced`, as many continue after a long tick: as of callers that another limiter has let through."""
        self._per_tick = per_tick
        self._paced = paced
        self._left = per_tick
        """How many may still continue in this tick; renewed by `_next_tick`, which is scheduled whenever one has."""
        self._renews = False
        """Whether `_next_tick` is scheduled."""
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self) -> bool:
        """Whether the caller may continue in this tick; if not, call `wait`."""
        if not self._left:
            return False
        if not self._renews:
            self._renew()
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

    def _renew(self) -> None:
        self._renews = True
        loop = asyncio.get_running_loop()
        _pace.note(loop)
        loop.call_soon(self._next_tick)

    def _next_tick(self) -> None:
        allowed = min(self._per_tick, max(1, int(self._per_tick * _pace.share))) if self._paced else self._per_tick
        admitted = min(allowed, len(self._waiting))
        self._left, self._renews = allowed - admitted, False
        if admitted:
            self._renew()
        for _ in range(admitted):
            self._waiting.popleft()()


class _Pace(threading.local):
    """The pace of a thread's loop: which share of its callers each limiter lets continue, by how long the last tick computed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._began: float | None = None
        """The CPU time of the thread when a limiter first let a caller continue in this tick; None if none has."""
        self.share = 1.0

    def note(self, loop: asyncio.AbstractEventLoop) -> None:
        """Notes that a limiter lets a caller continue in this tick."""
        if loop is not self._loop:
            self._loop, self._began, self.share = loop, None, 1.0
        if self._began is None:
            self._began = time.thread_time()
            loop.call_soon(self._tick_over)

    def _tick_over(self) -> None:
        assert self._began is not None
        computed, self._began = time.thread_time() - self._began, None
        self.share = max(_LEAST_SHARE, self.share / 2) if computed > TICK_SECONDS else min(1.0, self.share * 1.5)


_pace = _Pace()


def _end(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # its caller was cancelled
        turn.set_result(None)
