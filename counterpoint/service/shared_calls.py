"""The calls of all keys to the servers, each begun once its key has a place (`counterpoint/service/shares.py`).

At most one call of a request waits, so that a thousand samples are no thousand tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from itertools import count
from typing import Any, TypeVar

from counterpoint.service.shares import Shares, WaitingCall

Found = TypeVar("Found")

Work = tuple[int, Callable[[], Coroutine[Any, Any, Found]]]
"""The tokens that a call may take, with its prompt, and the call."""


class SharedCalls:
    """The places at the servers. For one event loop."""

    def __init__(self, *, alone: bool = False) -> None:
        """`alone`: there is one key."""
        self._shares = Shares(alone=alone)
        self._waiting: dict[WaitingCall, asyncio.Future[None]] = {}
        self._numbers = count()

    def resize(self, places: int) -> None:
        """Sets the number of calls that the servers take at once.

        Without a server it stays: calls wait there, and fail in time.
        """
        if places:
            self._shares.places = places
            self._begin()

    async def gathered(self, key: str, works: Iterable[Work[Found]], took: Callable[[Found], int]) -> list[Found]:
        """Returns the results of one request's calls, in their order. `took` returns the tokens that one has taken.

        If one fails, cancels the others and raises an `ExceptionGroup`.
        """
        number, tasks = next(self._numbers), list[asyncio.Task[Found]]()
        try:
            async with asyncio.TaskGroup() as group:
                for tokens, work in works:
                    call = await self._place(key, number, tokens)
                    tasks.append(group.create_task(work()))
                    # Not within the task: one that is cancelled before it begins would keep its place.
                    tasks[-1].add_done_callback(partial(self._ended, call, took))
            return [each.result() for each in tasks]
        finally:
            tasks.clear()  # the error refers to this frame, and would keep a thousand calls until a collection

    def _ended(self, call: WaitingCall, took: Callable[[Found], int], task: asyncio.Task[Found]) -> None:
        failed = task.cancelled() or task.exception() is not None
        self._end(call, call.tokens if failed else took(task.result()))

    async def _place(self, key: str, number: int, tokens: int) -> WaitingCall:
        call = self._shares.ask(key, number, tokens)
        begins = self._waiting[call] = asyncio.get_running_loop().create_future()
        self._begin()
        try:
            await begins
        except asyncio.CancelledError:
            if self._waiting.pop(call, None) is None:
                self._end(call, 0)
            else:
                self._shares.withdraw(call)
            raise
        return call

    def _end(self, call: WaitingCall, tokens: int) -> None:
        self._shares.end(call, tokens)
        self._begin()

    def _begin(self) -> None:
        for call in self._shares.begin():
            begins = self._waiting.pop(call)
            if not begins.done():  # else it is being cancelled, and gives its place back
                begins.set_result(None)
