"""Finds code that sets signal handlers, such as an alarm for a time limit: Python lets only the main thread of a process do that.

In another thread such code fails each time, and a library that catches everything turns this into a reward of 0. The time limits
of math-verify are alarms, and `verify_boxed_math_answer` of verifiers gives 0 for whatever is raised. So code that is seen to set
alarms is refused before it runs in a thread, and what is not seen fails when it sets one, whoever catches that.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

_ALARMS = frozenset(("alarm", "setitimer", "SIGALRM"))
_WITH_TIME_LIMITS = frozenset(("math_verify", "verify_boxed_math_answer"))
_NO_LIMITS = frozenset(("parsing_timeout", "timeout_seconds"))
"""Arguments of math-verify by which its alarms can be switched off."""

_asked: ContextVar[list[str] | None] = ContextVar("asked for signals", default=None)
_set_handler = signal.signal


class NeedsMainThread(RuntimeError):
    """Code that runs in a thread needs the main thread of a process. The message says which, and what to do."""


def uses_signals(modules: Iterable[str], remedy: str) -> None:
    """Raises `NeedsMainThread` if one of these modules, or one of the same package that it uses, sets alarms by its source."""
    waiting, seen = list(modules), set[str]()
    while waiting:
        module = sys.modules.get(name := waiting.pop())
        if module is None or name in seen:
            continue
        seen.add(name)
        if (what := _alarm_in(module)) is not None:
            raise NeedsMainThread(f"{module.__file__} uses {what}, and only the main thread of a process may; {remedy}")
        waiting += {used for used in _used_by(module) if used.partition(".")[0] == name.partition(".")[0]}


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


def _alarm_in(module: ModuleType) -> str | None:
    path = Path(getattr(module, "__file__", None) or "")
    if path.suffix != ".py":
        return None
    try:
        names = _names(compile(path.read_bytes(), str(path), "exec"))
    except (OSError, SyntaxError, ValueError):  # it is loaded, so this is no fault of it
        return None
    if "signal" in names and (alarms := _ALARMS & names):
        return f"signal.{min(alarms)}"
    if (limits := _WITH_TIME_LIMITS & names) and not names >= _NO_LIMITS:
        return f"{min(limits)} with its time limits, which are alarms"
    return None


def _names(code: CodeType) -> set[str]:
    """Returns the names that code uses, and those of arguments that it passes."""
    names = {part for name in code.co_names for part in name.split(".")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
        elif isinstance(constant, tuple):
            names |= {each for each in constant if isinstance(each, str)}
    return names


def _used_by(module: ModuleType) -> set[str]:
    used = set()
    for value in vars(module).values():
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str):
            used.add(name)
    return used
