"""Errors that the user can fix. The commands print a `UserError` without a traceback and exit with its code."""

from __future__ import annotations

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of a shell."""


class UserError(Exception):
    """Bad configuration, a missing model, a directory that may not be written.

    The message says what, where, which value, what was expected and what to do.
    """

    code = 2
    """The command's exit code."""


class Obstructed(UserError):
    """An obstacle that the next attempt may not meet: a port in use, a directory that another process has locked."""

    code = 75
    """`EX_TEMPFAIL` of sysexits.h."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read or used; the message names its file or directory, and the reason."""
