"""Says what a check of an environment waits for: how many rollouts still run, and at which line of the environment.

From a thread, so that it is said also of a rollout that blocks the event loop, and of code that runs before there is one.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from counterpoint.run.loop_health.stacks import Stack, frame_name, place_of, stack_of

PATIENCE_SECONDS = 10.0
"""Seconds until the wait is logged first, and until it is logged again."""

BLOCKED_SECONDS = 1.0
"""An event loop that does not answer for so long is blocked."""

END = signal.SIGRTMAX
"""The signal that ends code which blocks the loop. An environment may have a use of its own for the others, such as alarms."""


@contextmanager
def ending(what: str, say: Callable[[str], None], most_seconds: float) -> Iterator[None]:
    """Calls `say`, in a thread, while the block goes on, with the line where it is; ends it after `most_seconds`.

    `what` is code of an environment that may have no end: a `TimeoutError` is raised in it. For the main thread, without a loop.
    """
    ended, own = threading.Event(), threading.get_ident()

    def end(_number: int, _frame: FrameType | None) -> None:
        if not ended.is_set():
            raise TimeoutError(f"{what} has not ended after {most_seconds:g} s")

    def watch() -> None:
        seconds = 0.0
        while not ended.wait(PATIENCE_SECONDS):
            seconds += PATIENCE_SECONDS
            say(f"after {seconds:g} s {what} goes on at {_place(stack_of(sys._current_frames().get(own)), None)}")
            if seconds >= most_seconds:
                signal.pthread_kill(own, END)

    with _watching(watch, end, ended):
        yield


@contextmanager
def saying(
    rollouts: Sequence[asyncio.Task[None]], module: str, say: Callable[[str], None], most_blocked_seconds: float
) -> Iterator[None]:
    """Calls `say`, in a thread, while the block waits for `rollouts` on the running loop. `module`: the environment's.

    Code that has blocked the loop for `most_blocked_seconds` is ended by a `TimeoutError`: it may have no end of its own. For the
    main thread.
    """
    ended, loop, own = threading.Event(), asyncio.get_running_loop(), threading.get_ident()
    caller = asyncio.current_task()
    file = getattr(sys.modules.get(module), "__file__", None)

    def end(_number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:
            frame = frame.f_back
        if frame is not None and not ended.is_set():  # else the loop has just been given back
            raise TimeoutError(
                f"held the event loop for over {most_blocked_seconds:g} s; all other rollouts wait meanwhile"
            )

    def watch() -> None:
        seconds = blocked = 0.0
        while not ended.wait(PATIENCE_SECONDS):
            seconds += PATIENCE_SECONDS
            line = _asked(loop, lambda: _describe(rollouts, file, caller))
            blocked = 0.0 if line is not None else blocked + PATIENCE_SECONDS
            if line is None:
                line = f"the event loop is blocked at {_place(stack_of(sys._current_frames().get(own)), file)}"
            if not ended.is_set() and not all(task.done() for task in rollouts):
                say(f"after {seconds:g} s {line}")
            if blocked >= most_blocked_seconds:
                blocked = 0.0
                signal.pthread_kill(own, END)

    with _watching(watch, end, ended):
        yield


@contextmanager
def _watching(
    watch: Callable[[], None], end: Callable[[int, FrameType | None], None], ended: threading.Event
) -> Iterator[None]:
    """Runs `watch` in a thread, and `end` at its signal, until the block has ended."""
    thread = threading.Thread(target=watch, name="environment check, waiting")
    before = signal.signal(END, end)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        signal.signal(END, before)


def _asked(loop: asyncio.AbstractEventLoop, question: Callable[[], str]) -> str | None:
    """Returns what `question` answers on the loop; None where that is blocked."""
    answered, answers = threading.Event(), list[str]()

    def answer() -> None:
        answers.append(question())
        answered.set()

    loop.call_soon_threadsafe(answer)
    return answers[0] if answered.wait(BLOCKED_SECONDS) else None


def _describe(rollouts: Sequence[asyncio.Task[None]], file: str | None, caller: object) -> str:
    """Says how many rollouts run, and where. A rollout's task waits for others: all tasks are searched for the file's lines."""
    running = [task for task in rollouts if not task.done()]
    stacks = [_awaited(task) for task in asyncio.all_tasks() if task is not caller]
    own = [stack for stack in stacks if any(code.co_filename == file for code, _ in stack)]
    places = Counter(_place(stack, file) for stack in own or map(_awaited, running))
    waits = "; ".join(f"{count} at {place}" for place, count in places.most_common(3))
    if len(rollouts) == 1:
        return f"it waits at {waits.removeprefix('1 at ')}"
    return (
        f"{len(rollouts) - len(running)} of {len(rollouts)} rollouts of this round have ended, and others wait: {waits}"
    )


def _awaited(task: asyncio.Task[Any]) -> Stack:
    """The stack of a task that waits, innermost frame first, as of a thread."""
    frames: list[FrameType] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(awaited, f"{kind}_frame")), None)
        if kind is None or (frame := getattr(awaited, f"{kind}_frame")) is None:
            break
        frames.append(frame)
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return tuple((frame.f_code, frame.f_lasti) for frame in reversed(frames))


def _place(stack: Stack, file: str | None) -> str:
    """The innermost line of the environment's file, else of any code outside libraries."""
    own = next((position for position in stack if position[0].co_filename == file), None)
    if own is not None:
        return frame_name(own)
    place = place_of(stack)
    return f"{place.function} ({place.file}:{place.line})"
