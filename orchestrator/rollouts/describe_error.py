"""Says what somebody else's code raised: an environment, an advantage function. Such code may raise anything."""

from __future__ import annotations

import traceback

_LONGEST_ERROR = 2000
"""Characters kept of what was raised."""


def describe_error(error: BaseException) -> str:
    """The type, the text and the place of a caught exception, as text that every file can hold. Never raises."""
    try:
        said = str(error)
    except BaseException as fault:  # noqa: BLE001 - an exception's `__str__` is somebody else's code, too
        said = f"(its text cannot be had: {type(fault).__name__})"
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    code = frame.f_code
    message = f"{type(error).__name__}: {said} (in {code.co_name}, {code.co_filename}:{line})"
    message = message if len(message) <= _LONGEST_ERROR else message[:_LONGEST_ERROR] + "..."
    # Lone surrogates, as file names and cut emoji have them, are no UTF-8: neither JSON nor msgpack would take them.
    return message.encode(errors="backslashreplace").decode()
