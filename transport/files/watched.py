"""What is read of files that an operator may change while a process runs, such as keys and tokens: read again once they change.

Nothing is watched by itself: an owner calls `refresh` where it may block, which looks at most once a second. SIGHUP has the next
look read in any case (`read_all_again`), also where a file system does not tell that a file has changed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

Read = TypeVar("Read")

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Shortest time between two looks."""

_requests = 0
"""How often everything was to be read again."""


def read_all_again() -> None:
    """Has every `Watched` of this process read its files at its next look. May be called in any thread."""
    global _requests
    _requests += 1


class Watched(Generic[Read]):
    """What `read` returned last of `paths`, which are files and directories of files. For any thread."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], Read]) -> None:
        """Raises what `read` raises."""
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        self._requests = _requests
        self._state = _state_of(paths)
        self._looked = time.monotonic()
        self._complaint = ""
        self.value = read()

    def refresh(self, *, now: bool = False) -> bool:
        """Reads again what has changed; returns whether `value` is another. Blocks on the disk; `now`: looks in any case.

        What cannot be read, as while an operator replaces one file after the other, leaves `value` as it is, and is logged once.
        """
        with self._lock:
            if not now and time.monotonic() - self._looked < LOOK_SECONDS:
                return False
            self._looked = time.monotonic()
            requests, state = _requests, _state_of(self._paths)
            if requests == self._requests and state == self._state and not self._complaint:
                return False
            try:
                value = self._read()
            except (OSError, ValueError) as error:
                if str(error) != self._complaint:
                    logger.error("%s; what was read before stays in use", error)
                self._complaint = str(error)
                return False
            self._requests, self._state, self._complaint = requests, state, ""
            if value == self.value:
                return False
            self.value = value
            logger.info("read again, since it has changed: %s", ", ".join(map(str, self._paths)))
            return True


def _state_of(paths: Sequence[Path]) -> tuple[object, ...]:
    """Returns what differs once any of the files, or of those in the directories, has changed."""
    state: list[object] = []
    for path in paths:
        state.append(_stamp(path))
        if path.is_dir():
            state += [(each.name, _stamp(Path(each.path))) for each in sorted(os.scandir(path), key=lambda it: it.name)]
    return tuple(state)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino
