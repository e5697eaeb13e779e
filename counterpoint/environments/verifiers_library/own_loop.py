"""An asyncio loop in a thread of its own, on which the library runs.

Rewards, hooks and user simulators of other authors often compute or read files where they should await. On this loop they hold
up one another only, and the orchestrator's loop just as long as Python's lock is passed around. It is a loop of asyncio's own, as
the library is developed on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")


class OwnLoop:
    """A running loop. Safe to use from any other loop of the process."""

    def __init__(self, name: str) -> None:
        """Starts the thread."""
        self._loop = asyncio.SelectorEventLoop()
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work` there and returns its result. A cancellation cancels it there, too, without waiting for its end."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def close(self, seconds: float) -> None:
        """Cancels what still runs, waits for it at most `seconds`, and ends the thread."""
        try:
            async with asyncio.timeout(seconds):
                await self.run(_cancel_others())
        finally:
            self._is_closing = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join, seconds)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._is_closing:
                # A task that raises one of these ends the loop. It has its exception all the same; the others go on.
                with suppress(SystemExit, KeyboardInterrupt):
                    self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            asyncio.set_event_loop(None)
            self._loop.close()


class SameLoop:
    """The caller's loop in its place, in a process of the environment's: its main thread may set signal handlers."""

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work` and returns its result."""
        return await work

    async def close(self, seconds: float) -> None:
        """Nothing: the caller ends what still runs."""


async def on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs `work` on another loop, with the caller's context, and returns its result."""
    if loop is asyncio.get_running_loop():
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
