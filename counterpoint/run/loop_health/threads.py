"""The daemon's own threads. Environments use those of `asyncio.to_thread`, and an operator's advantage has others.

Their work may be slow or never end. With one pool for all, scorers that hang would block the daemon's commits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from counterpoint.transport.process.priority import lower_own_priority, short_slice

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_SWITCH_INTERVAL_SECONDS = 0.0001
"""How long a thread that runs Python may keep the GIL from the loop; Python's default is 5 ms."""

_MOST_HANGING = 1024
"""Calls of environments that may hang before others wait for a thread. Threads are made only as they are needed."""

_threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="orchestrator")
_computer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="computing")
_advantages = ThreadPoolExecutor(max_workers=8, thread_name_prefix="advantage")
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


async def advantage_in_thread(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
) -> Result:
    """Runs a function that calls an operator's advantage function, as `in_thread`.

    If that hangs, merging and thus every step must not wait for it; nor must it wait for environments that hang.
    """
    return await _run_in(_advantages, partial(function, *arguments, **keywords))


async def record_in_thread(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
) -> Result:
    """Runs a function that writes gigabytes, as `in_thread`, but one at a time and with a lower priority than the loop.

    The function must start no process: it would inherit the priority.
    """
    return await _run_in(_recorder, partial(function, *arguments, **keywords))


async def _run_in(threads: ThreadPoolExecutor, call: Callable[[], Result]) -> Result:
    calls = [call]
    del call
    work = threads.submit(contextvars.copy_context().run, _call_last, calls)
    await _End(work)
    try:
        return work.result()
    finally:
        del work  # else its error refers to this frame, and this frame to it


def _call_last(calls: list[Callable[[], Result]]) -> Result:
    """Removes the call and makes it, so that a thread which is held up after its work keeps none of the arguments.

    Otherwise such a thread would be the last to refer to a step's rollouts, and would free them all while it holds the GIL.
    """
    return calls.pop()()


class _End:
    """Awaits the end of a thread's work. Its task is resumed in the iteration of the loop that notices the end.

    `run_in_executor` sets a future in that iteration, and asyncio resumes the future's task in the next one. Beside tasks that
    keep the loop busy, each call would wait for all of them twice. So this is what a task accepts in place of a future: the
    thread schedules the task itself.
    """

    _asyncio_future_blocking = False
    """A task expects this of what it awaits."""

    def __init__(self, work: concurrent.futures.Future[Any]) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._resume: list[tuple[Callable[[_End], object], contextvars.Context]] = []
        """The callback that resumes the task, and its context. The thread or a cancellation removes it, and calls it once."""
        self._cancelled = False

    def __await__(self) -> Generator[Any, None, None]:
        self._asyncio_future_blocking = True
        try:
            yield self
        finally:
            del self._work  # which refers to this: no cycle may keep its result

    # --- what a task calls ---

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, callback: Callable[[_End], object], *, context: contextvars.Context) -> None:
        self._resume.append((callback, context))
        self._work.add_done_callback(self._ended)

    def cancel(self, msg: object = None) -> bool:
        if not self._resume_by(self._loop.call_soon):
            return False
        self._cancelled = True
        self._work.cancel()  # unless it has begun
        return True

    def result(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError

    # --- in the thread ---

    def _ended(self, work: concurrent.futures.Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._resume_by(self._loop.call_soon_threadsafe)

    def _resume_by(self, schedule: Callable[..., object]) -> bool:
        try:
            callback, context = self._resume.pop()
        except IndexError:
            return False
        schedule(callback, self, context=context)
        return True


@contextmanager
def prompt_switching() -> Iterator[None]:
    """Shortens the switch interval and the calling thread's slice during the block: its loop has the GIL and a core sooner."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    try:
        with short_slice():
            yield
    finally:
        sys.setswitchinterval(before)


def give_environments_threads(count: int) -> ThreadPoolExecutor:
    """Gives `asyncio.to_thread` of the running loop `count` threads, and as many as may hang, and returns them.

    A rollout that exceeds its time is given up, but a call in a thread cannot be: it keeps its thread for ever if it hangs.
    Those that it had end with the work that they have; `shutdown(wait=False)` tells them to.
    """
    threads = ThreadPoolExecutor(max_workers=count + _MOST_HANGING, thread_name_prefix="environment")
    asyncio.get_running_loop().set_default_executor(threads)
    return threads
