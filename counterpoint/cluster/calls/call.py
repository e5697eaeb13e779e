"""A call under way: awaitable on any event loop, and with `result()` for plain code in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Call(Future[T]):
    """One call: `await` it, or block in `result()`. It ends by its deadline at the latest.

    Both return what the method returned, or raise an `errors.CallError`. Cancelling it gives up the answer; the method may run.
    It is a `concurrent.futures.Future`, so `as_completed` and `wait` take it.
    """

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


class Calls(Generic[T]):
    """Several calls as one: `await` it, or block in `result()`.

    Both return what the calls returned together, or raise the first error as soon as there is one; it names its worker. The
    other calls go on, and `each` has them all: to know of every failure, look at `call.exception()` of each.
    """

    def __init__(self, each: Sequence[Call[Any]], join: Callable[[list[Any]], T]) -> None:
        self.each = tuple(each)
        """One call a worker, by rank."""
        self._join = join

    def result(self) -> T:
        """Waits and returns the result. Not for code on an event loop, which it would stop."""
        wait(self.each, return_when=FIRST_EXCEPTION)
        for call in self.each:
            if call.done():
                call.result()  # raises if it failed
        return self._join([call.result() for call in self.each])

    def __await__(self) -> Generator[Any, None, T]:
        return self._gathered().__await__()

    async def _gathered(self) -> T:
        return self._join(await asyncio.gather(*(asyncio.wrap_future(call) for call in self.each)))
