"""Priorities for systemd's journal: lines that go there begin with that of their record, as sd-daemon(3) says.

Elsewhere, and in files, nothing is added. systemd says by `$JOURNAL_STREAM` which file is the journal's, so that a child whose
output goes to a log does not take its own for it.
"""

from __future__ import annotations

import logging
import os
from typing import TextIO

_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7


def goes_to_journal(stream: TextIO) -> bool:
    """Whether systemd reads what is written to `stream`."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or no file
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def prioritized(text: str, level: int, stream: TextIO) -> str:
    """Returns the text for `stream`, each line with the priority of `level`, one of `logging`, if the journal reads it."""
    return _prefixed(text, level) if goes_to_journal(stream) else text


def formatter_for(stream: TextIO, formatter: logging.Formatter) -> logging.Formatter:
    """Returns what formats records for `stream`: `formatter`, with priorities if the journal reads it."""
    return _JournalFormatter(formatter) if goes_to_journal(stream) else formatter


class _JournalFormatter(logging.Formatter):
    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return _prefixed(self._inner.format(record), record.levelno)


def _prefixed(text: str, level: int) -> str:
    priority = next((number for least, number in _PRIORITIES if level >= least), _DEBUG)
    # The journal makes an entry of each line.
    return "\n".join(f"<{priority}>{line}" if line else line for line in text.split("\n"))
