"""Tasks that run beside one another, belong to one owner, and end with it. The log has their failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0
"""The time after which a task that has failed is begun anew."""


class Tasks:
    """The tasks of an owner, who cancels them at its end."""

    def __init__(self, owner: str) -> None:
        """`owner` is named in the log."""
        self._owner = owner
        self._tasks: set[asyncio.Task[None]] = set()
        self.are_ending = False
        """Whether the owner ends them. A task that is cancelled before has died."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begins a task, and returns it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begins a task for which others wait. Begins it anew after each end but a return, until the owner ends it."""

        def ended(task: asyncio.Task[None]) -> None:
            if not self.are_ending and (task.cancelled() or task.exception() is not None):
                asyncio.get_running_loop().call_later(AGAIN_SECONDS, self.keep, work)

        if not self.are_ending:
            self.spawn(work()).add_done_callback(ended)

    async def cancel(self) -> None:
        """Cancels the tasks, and returns once they have ended."""
        self.are_ending = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: a task failed", self._owner, exc_info=error)
