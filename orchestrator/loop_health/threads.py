"""The daemon's own threads. `asyncio.to_thread` is left to environments and other code by import path, whose work may
be slow or never end.

Were there one pool for both, scorers that hang would keep the daemon from its own commits.
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

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_SWITCH_INTERVAL_SECONDS = 0.0001
"""How long a thread running Python may hold the loop off; Python's default is 5 ms."""

_threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="orchestrator")
_computer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="computing")


async def in_thread(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
) -> Result:
    """`function(*arguments)` in one of the daemon's threads, in the caller's context. Cancelling does not end the function."""
    return await _run_in(_threads, partial(function, *arguments, **keywords))


async def run_cpu_bound(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
) -> Result:
    """As `in_thread`, for what computes instead of waiting: one after the other. Threads that compute take turns on the GIL, and
    the loop's turn would come the later the more of them there are, while none gets done sooner."""
    return await _run_in(_computer, partial(function, *arguments, **keywords))


async def _run_in(threads: ThreadPoolExecutor, call: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(threads, contextvars.copy_context().run, call)


@contextmanager
def prompt_switching() -> Iterator[None]:
    """Lets the loop take the GIL back sooner from threads that run Python, during the block."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def give_environments_threads(count: int) -> None:
    """Lets `asyncio.to_thread` of the running loop do `count` things at once, instead of a handful."""
    asyncio.get_running_loop().set_default_executor(
        ThreadPoolExecutor(max_workers=count, thread_name_prefix="environment")
    )
