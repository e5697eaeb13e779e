"""Describes what an environment or an advantage function raised. Such code may raise anything."""

from __future__ import annotations

import traceback

from environments.workers.errors import WorkerError

_LONGEST_ERROR = 2000
"""Characters of a description; the rest is cut off."""


def describe_error(error: BaseException) -> str:
    """Returns type, text and place of a caught exception, as text that is valid UTF-8. Never raises."""
    try:
        text = str(error)
    except BaseException as fault:  # noqa: BLE001 - an exception's `__str__` is foreign code, too
        text = f"(its text cannot be had: {type(fault).__name__})"
    if isinstance(error, WorkerError):
        return _bounded(text)
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    code = frame.f_code
    return _bounded(f"{type(error).__name__}: {text} (in {code.co_name}, {code.co_filename}:{line})")


def _bounded(message: str) -> str:
    message = message if len(message) <= _LONGEST_ERROR else message[:_LONGEST_ERROR] + "..."
    # Lone surrogates, which file names and cut emoji contain, are not UTF-8: JSON and msgpack refuse them.
    return message.encode(errors="backslashreplace").decode()
