"""The daemon's own threads. Environments and other code by import path use those of `asyncio.to_thread`.

Their work may be slow or never end. With one pool for both, scorers that hang would block the daemon's commits.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from transport.process.priority import lower_own_priority

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_SWITCH_INTERVAL_SECONDS = 0.0001
"""How long a thread that runs Python may keep the GIL from the loop; Python's default is 5 ms."""

_threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="orchestrator")
_computer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="computing")
_recorder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="recording", initializer=lower_own_priority)


async def in_thread(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
) -> Result:
    """Runs the function in one of the daemon's threads, in the caller's context. Cancelling does not end the function."""
    return await _run_in(_threads, partial(function, *arguments, **keywords))


async def run_cpu_bound(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
) -> Result:
    """Runs a function that computes, as `in_thread`, but one at a time.

    Threads that compute share the GIL: with more of them the loop would wait longer, and none would end sooner.
    """
    return await _run_in(_computer, partial(function, *arguments, **keywords))


async def record_in_thread(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
) -> Result:
    """Runs a function that writes gigabytes, as `in_thread`, but one at a time and with a lower priority than the loop.

    The function must start no process: it would inherit the priority.
    """
    return await _run_in(_recorder, partial(function, *arguments, **keywords))


async def _run_in(threads: ThreadPoolExecutor, call: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(threads, contextvars.copy_context().run, call)


@contextmanager
def prompt_switching() -> Iterator[None]:
    """Shortens the switch interval during the block, so that the loop acquires the GIL sooner."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def give_environments_threads(count: int) -> ThreadPoolExecutor:
    """Gives `asyncio.to_thread` of the running loop `count` threads, and returns them.

    Those that it had end with the work that they have; `shutdown(wait=False)` tells them to.
    """
    threads = ThreadPoolExecutor(max_workers=count, thread_name_prefix="environment")
    asyncio.get_running_loop().set_default_executor(threads)
    return threads
