"""Finds code that sets signal handlers, such as an alarm for a time limit: Python lets only the main thread of a process do that.

In another thread such code fails each time, and a library that catches everything turns this into a reward of 0. The time limits
of math-verify are alarms, and `verify_boxed_math_answer` of verifiers gives 0 for whatever is raised. So code that is seen to set
alarms is refused before it runs in a thread, and what is not seen fails when it sets one, whoever catches that.
"""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

_ALARMS = frozenset(("alarm", "setitimer", "SIGALRM"))
_WITH_TIME_LIMITS = frozenset(("math_verify", "verify_boxed_math_answer"))
_NO_LIMITS = {"parse": "parsing_timeout", "verify": "timeout_seconds"}
"""The argument by which the alarm of each function of math-verify can be switched off, by the function's name."""

_asked: ContextVar[list[str] | None] = ContextVar("asked for signals", default=None)
_set_handler = signal.signal


class NeedsMainThread(RuntimeError):
    """Code that runs in a thread needs the main thread of a process. The message says which, and what to do."""


def uses_signals(roots: Iterable[Any], remedy: str) -> None:
    """Raises `NeedsMainThread` if one of these functions and classes, or what they use of the same package, sets alarms.

    It goes by the names in their code, so that what is called in a roundabout way is not seen.
    """
    waiting, seen = list(roots), set[int]()
    while waiting:
        each = inspect.unwrap(waiting.pop())
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, type):
            waiting += [getattr(value, "__func__", value) for value in vars(each).values() if callable(value)]
        elif isinstance(each, FunctionType):
            names = _names(each.__code__)
            used = {name: each.__globals__[name] for name in names & each.__globals__.keys()}
            if (what := _alarm_in(names, used)) is not None:
                place = f"{each.__code__.co_filename}:{each.__code__.co_firstlineno}"
                raise NeedsMainThread(f"{each.__name__} ({place}) uses {what}, for a main thread only; {remedy}")
            waiting += [other for other in used.values() if _package(other) == _package(each)]


@contextmanager
def without_signals(remedy: str) -> Iterator[None]:
    """Raises `NeedsMainThread` after a block whose code wanted to set a handler in another thread than the main one."""
    if signal.signal is not _in_main_thread_only:
        signal.signal = _in_main_thread_only  # type: ignore[assignment]
    asked: list[str] = []
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)
        if asked:
            raise NeedsMainThread(
                f"{asked[0]} sets a signal handler, and only the main thread of a process may; {remedy}"
            )


def _in_main_thread_only(number: Any, handler: Any) -> Any:
    asked = _asked.get()
    if asked is not None and threading.current_thread() is not threading.main_thread():
        frame: FrameType | None = sys._getframe(1)
        asked.append("?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}")
    return _set_handler(number, handler)


def _alarm_in(names: set[str], used: Mapping[str, Any]) -> str | None:
    """Returns what a function with these names in its code uses, the globals among them given."""
    if (alarms := _ALARMS & names) and (
        "signal" in names or any(_package(used.get(each)) == "signal" for each in alarms)
    ):
        return f"signal.{min(alarms)}"
    packages = {_package(value) for value in used.values()}
    if (packages | names) & _WITH_TIME_LIMITS and not _has_no_limits(names, used):
        return "math_verify with its time limits, which are alarms"
    return None


def _has_no_limits(names: set[str], used: Mapping[str, Any]) -> bool:
    """Whether every function of math-verify that is used gets the argument that switches its limit off; False if none is seen."""
    functions = names | {getattr(value, "__name__", "") for value in used.values()}
    needed = {argument for function, argument in _NO_LIMITS.items() if function in functions}
    return bool(needed) and names >= needed


def _package(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0].removeprefix("_")


def _names(code: CodeType) -> set[str]:
    """Returns the names that code uses, and those of arguments that it passes."""
    names = {part for name in code.co_names for part in name.split(".")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
        elif isinstance(constant, tuple):
            names |= {each for each in constant if isinstance(each, str)}
    return names
