"""Deadlines of many requests by one timer of the loop: a timer for each costs more than all else of waiting."""

from __future__ import annotations

import asyncio


def end(block: asyncio.Timeout) -> None:
    """Lets a block that has been entered expire now, unless it expires already: its call may take a while to end."""
    if not block.expired():
        block.reschedule(0.0)


class BlockDeadlines:
    """Ends the blocks of `asyncio.timeout(None)` that are still in progress at their deadline. For one event loop."""

    def __init__(self) -> None:
        self._due: dict[asyncio.Timeout, float] = {}
        self._next = float("inf")
        """The end of the timer, on the loop's clock: no later than any block is due."""
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, block: asyncio.Timeout, due: float) -> None:
        """Lets `block`, which has been entered, expire at `due` on the loop's clock, unless it is forgotten before."""
        self._due[block] = due
        if due < self._next:
            self._set(due)

    def has_ended(self, block: asyncio.Timeout) -> bool:
        """Whether a watched block reached its deadline and was ended."""
        return block not in self._due

    def forget(self, block: asyncio.Timeout) -> None:
        """Stops watching a block. The timer stays, since others are due soon after."""
        self._due.pop(block, None)

    def _set(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next, self._timer = due, asyncio.get_running_loop().call_at(due, self._expire)

    def _expire(self) -> None:
        now, self._next, self._timer = self._next, float("inf"), None
        for block in [block for block, due in self._due.items() if due <= now]:
            del self._due[block]
            end(block)
        if self._due:
            self._set(min(self._due.values()))
