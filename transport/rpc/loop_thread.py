"""An event loop in a thread of its own, for code that has none: the calls of a worker, whose `start` has the main thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class LoopThread:
    """The loop, which runs from now on until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, work: Callable[..., object], *arguments: Any) -> bool:
        """Has the loop do something soon; returns whether it runs. For any thread."""
        try:
            self._loop.call_soon_threadsafe(work, *arguments)
        except RuntimeError:  # it is closed
            return False
        return True

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine on the loop. For any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, seconds: float) -> bool:
        """Cancels what runs, and ends the loop; returns whether it ended within so many seconds."""
        self.post(self._loop.stop)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
