"""Errors that are the user's to mend: shown as they are, without a traceback, and ending with exit code 2."""

from __future__ import annotations

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell's."""


class UserError(Exception):
    """Bad configuration, a missing model, a directory that may not be written. The message says what, where, which value, what
    was expected and what to do."""

    code = 2
    """The command's exit code."""


class Obstructed(UserError):
    """An obstacle that may be gone at the next attempt: a port in use, a directory in which another process works."""

    code = 1
