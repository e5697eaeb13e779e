"""Describes what an environment or an advantage function raised. Such code may raise anything."""

from __future__ import annotations

import traceback
from types import FrameType

from counterpoint.environments.base import WorkerError
from counterpoint.environments.reward import NoReward
from counterpoint.transport.printable import clipped

_LONGEST_ERROR = 2000
"""Characters of an exception's text; the rest is cut off."""

_TASKS = "counterpoint.environments.tasks."
"""How the modules of the built-in environments begin."""


def describe_error(error: BaseException) -> str:
    """Returns type, text and place of a caught exception, as text that is valid UTF-8. Never raises.

    Where a library or we raised what foreign code called, the place in that code comes first.
    """
    try:
        text = str(error)
    except BaseException as fault:  # noqa: BLE001 - an exception's `__str__` is foreign code, too
        text = f"(its text cannot be had: {type(fault).__name__})"
    text = clipped(text, _LONGEST_ERROR)
    if isinstance(error, NoReward):
        text = f"{type(error).__name__}: {text}"
    elif not isinstance(error, WorkerError):
        text = f"{type(error).__name__}: {text}{_missing_await(error, text)} (in {place_in(error)})"
    # Lone surrogates, which file names and cut emoji contain, are not UTF-8: JSON and msgpack refuse them.
    return text.encode(errors="backslashreplace").decode()


def _missing_await(error: BaseException, text: str) -> str:
    """What to do if the error came of a coroutine that was taken for its result."""
    if not isinstance(error, AttributeError | TypeError) or "'coroutine'" not in text:
        return ""
    name = getattr(getattr(error, "obj", None), "__name__", "")
    return f"; `await` is missing before the call {f'of {name}' if name else 'that made it'}"


def place_in(error: BaseException) -> str:
    """Returns where a caught exception passed foreign code and where it was raised: functions, files and lines."""
    frames = list(traceback.walk_tb(error.__traceback__))
    theirs = next((found for found in reversed(frames) if _is_theirs(found[0])), frames[-1])
    return ", in ".join(map(_line, dict.fromkeys((theirs, frames[-1]))))


def describe_loading(error: BaseException) -> str:
    """Returns type and text of what the loading of foreign code raised, and its line, if its code had begun to run."""
    theirs = next((found for found in traceback.walk_tb(error.__traceback__) if _is_theirs(found[0])), None)
    return f"{type(error).__name__}: {error}{f' (in {place_in(error)})' if theirs else ''}"


def _line(found: tuple[FrameType, int]) -> str:
    code = found[0].f_code
    return f"{code.co_name}, {code.co_filename}:{found[1]}"


def _is_theirs(frame: FrameType) -> bool:
    """Whether it is code of the environment's author, neither ours nor a library's."""
    module = str(frame.f_globals.get("__name__"))
    if "/lib/python" in frame.f_code.co_filename or frame.f_code.co_filename.startswith("<"):
        return False
    return module.startswith(_TASKS) or module.partition(".")[0] != "counterpoint"
