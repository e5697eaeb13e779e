"""What is read of files that an operator may change while a process runs, such as keys and tokens: read again and again.

Nothing happens by itself: an owner calls `refresh` where it may block. The files are small, so they are read at each look: no
file system has to tell that they have changed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Read = TypeVar("Read")

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Shortest time between two looks."""


class Watched(Generic[Read]):
    """What `read` returned last of `what`, a name for people. For any thread."""

    def __init__(self, what: str, read: Callable[[], Read]) -> None:
        """Raises what `read` raises."""
        self._what = what
        self._read = read
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._complaint = ""
        self.value = read()

    @property
    def due(self) -> bool:
        """Whether `refresh` would look at the files now."""
        return time.monotonic() - self._looked >= LOOK_SECONDS

    def refresh(self, *, now: bool = False) -> bool:
        """Reads the files, at most once in `LOOK_SECONDS` unless `now` is set; returns whether `value` is another one.

        Blocks on the disk. What cannot be read, as while an operator replaces one file after the other, leaves `value` as it
        is, and is logged once.
        """
        with self._lock:
            if not (now or self.due):
                return False
            self._looked = time.monotonic()
            try:
                value = self._read()
            except (OSError, ValueError) as error:
                if str(error) != self._complaint:
                    logger.error("%s; what was read before stays in use", error)
                self._complaint = str(error)
                return False
            self._complaint = ""
            if value == self.value:
                return False
            self.value = value
            logger.info("%s: read again, and in use", self._what)
            return True
