"""Runs Ray's blocking calls beside the event loop: each in a daemon thread, with a name and a deadline.

A thread of a pool would keep the process from ending while a call hangs, and Ray's first connection to a dead address never ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

from counterpoint.cluster.errors import BackendError, ClusterError

Given = ParamSpec("Given")
Result = TypeVar("Result")


async def in_thread(
    what: str, seconds: float, function: Callable[Given, Result], *arguments: Given.args, **named: Given.kwargs
) -> Result:
    """Returns what a call of Ray returns. Raises `BackendError` if it fails or takes longer; `what` says what it is for."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Result] = loop.create_future()

    def deliver(result: Result | None, error: BaseException | None) -> None:
        if answer.done():
            return  # nobody waits any more
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]  # it is the call's

    def run() -> None:
        result, problem = None, None
        try:
            result = function(*arguments, **named)
        except ClusterError as error:
            problem = error
        except Exception as error:  # noqa: BLE001 - Ray raises its own errors, gRPC's and Python's
            first = (str(error).splitlines() or [""])[0]
            problem = BackendError(f"{what} failed: {type(error).__name__}: {first}")
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, problem)

    threading.Thread(target=run, name=f"ray: {what}", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise BackendError(f"{what} took more than {seconds:g} s; does the Ray cluster live?") from None
