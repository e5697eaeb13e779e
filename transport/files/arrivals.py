"""Notices at once that something has appeared in a directory (Linux's inotify), for waits that would otherwise poll slowly.

It only shortens a wait: where the kernel gives no notice (a directory on another machine's file system, a limit on watches), the
wait lasts its full time, and the caller looks at the directory all the same.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

_MOVED_TO, _ONLY_DIRECTORIES = 0x80, 0x01000000
_GONE = 0x8000
"""IN_MOVED_TO, IN_ONLYDIR and IN_IGNORED of `inotify(7)`."""

_EVENT_BYTES, _READ_BYTES = 16, 65_536
"""Length of an event without its name, and the most that is read at once."""


class Arrivals:
    """Waits for renames into `directory`, which need not exist yet. For one task of a running loop; close it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._watch = -1
        self._descriptor: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            logger.debug("%s is polled: %s", directory, os.strerror(ctypes.get_errno()))
        else:
            self._loop.add_reader(self._descriptor, self._read)

    def watch(self) -> None:
        """Begins to watch, or goes on: call it before each look at the directory, so that no arrival is missed in between."""
        self._arrived.clear()
        if self._descriptor >= 0 and self._watch < 0:
            name = os.fsencode(self._directory)
            self._watch = self._libc.inotify_add_watch(self._descriptor, name, _MOVED_TO | _ONLY_DIRECTORIES)

    def notice(self) -> None:
        """Ends the present wait, and the next one if there is none: an arrival is known from elsewhere."""
        self._arrived.set()

    async def wait(self, seconds: float) -> None:
        """Returns at the first arrival since `watch`, and after `seconds` in any case."""
        try:
            async with asyncio.timeout(seconds):
                await self._arrived.wait()
        except TimeoutError:
            return

    def close(self) -> None:
        """Ends the watch. Safe to call twice."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self) -> None:
        try:
            events = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        position = 0
        while position + _EVENT_BYTES <= len(events):
            mask = int.from_bytes(events[position + 4 : position + 8], "little")
            if mask & _GONE:
                self._watch = -1  # the directory was removed; one of the same name may follow
            position += _EVENT_BYTES + int.from_bytes(events[position + 12 : position + 16], "little")
        self._arrived.set()
