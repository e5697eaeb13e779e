"""Calls a worker's hooks, and says in one line how one failed: an exception, or `sys.exit` with a code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from cluster.manager.events import LONGEST_REASON

FAILED = 1
"""Exit code after an exception."""


class HookEndedError(Exception):
    """A hook raised, or called `sys.exit`: the process is to end with `code`. The text is the reason."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


def call(name: str, hook: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what the hook returns. Raises `HookEndedError`, after it has written the traceback to the log."""
    try:
        return hook(*arguments)
    except SystemExit as error:
        code = 0 if error.code is None else error.code
        if isinstance(code, int):
            code = code & 0xFF
            raise HookEndedError(f"`{name}` called sys.exit({error.code})", code) from error
        print(error.code, file=sys.stderr, flush=True)  # noqa: T201 - as the interpreter does
        raise HookEndedError(_cut(f"`{name}` called sys.exit({error.code!r})"), FAILED) from error
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        raise HookEndedError(_cut(f"`{name}` raised {last_line(error)}"), FAILED) from error


def last_line(error: BaseException) -> str:
    """Returns the last line of the error's traceback."""
    try:
        lines = "".join(traceback.format_exception_only(error)).split("\n")
    except Exception as further:  # noqa: BLE001 - the exception's own __str__ raised
        return f"{type(error).__name__} (its text cannot be made: {type(further).__name__})"
    return " ".join(line.strip() for line in lines if line.strip())


def _cut(reason: str) -> str:
    return reason if len(reason) <= LONGEST_REASON else f"{reason[: LONGEST_REASON - 3]}..."
