"""Deadlines of many waits by one timer of the loop: a timer for each costs more than all else of waiting."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType


class DeadlineBlock:
    """A block that raises `TimeoutError` once it is due or `end` was called, as one of `asyncio.timeout`, at half the cost.

    `BlockDeadlines.until` makes it. Enter it once, in a task.
    """

    __slots__ = ("_before", "_cancelled", "_deadlines", "_ended", "_task", "due", "was_due")

    def __init__(self, deadlines: BlockDeadlines, due: float) -> None:
        self.due = due
        """Its deadline, on the loop's clock."""
        self.was_due = False
        """Whether its deadline has ended it, and not somebody else."""
        self._deadlines = deadlines
        self._task: asyncio.Task[object] | None = None
        """The task that is in the block."""
        self._ended = self._cancelled = False

    def __enter__(self) -> DeadlineBlock:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._before = task, task.cancelling()
        self._deadlines._watch(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadlines._forget(self)
        task, self._task = self._task, None
        if not self._ended or task is None:
            return
        # A block that somebody has cancelled besides stays cancelled.
        is_ours = self._cancelled and task.uncancel() <= self._before and kind is asyncio.CancelledError
        if is_ours or kind is None:  # the latter: its work was done just as it was ended
            raise TimeoutError from error

    def end(self) -> None:
        """Ends the block soon, unless it ends already: what it awaits may take a while to end."""
        if not self._ended:
            self._ended = True
            asyncio.get_running_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._cancelled = True
            self._task.cancel()


class BlockDeadlines(threading.local):
    """Ends blocks that are still in progress at their deadline.

    Each thread has its own. Of loops that follow one another in a thread, the blocks of former ones are forgotten.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: dict[DeadlineBlock, None] = {}
        self._next = float("inf")
        """The end of the timer, on the loop's clock: no later than any block is due."""
        self._timer: asyncio.TimerHandle | None = None

    def until(self, due: float) -> DeadlineBlock:
        """Returns a block that ends at `due`, on the loop's clock."""
        return DeadlineBlock(self, due)

    def _watch(self, block: DeadlineBlock) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._watched, self._next, self._timer = loop, {}, float("inf"), None
        self._watched[block] = None
        if block.due < self._next:
            self._set(block.due)

    def _forget(self, block: DeadlineBlock) -> None:
        """Stops watching a block. The timer stays, since others are due soon after."""
        self._watched.pop(block, None)

    def _set(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next, self._timer = due, asyncio.get_running_loop().call_at(due, self._expire)

    def _expire(self) -> None:
        now, self._next, self._timer = self._next, float("inf"), None
        for block in [block for block in self._watched if block.due <= now]:
            del self._watched[block]
            block.was_due = not block._ended
            block.end()
        if self._watched:
            self._set(min(block.due for block in self._watched))
