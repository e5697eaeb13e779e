"""What a SIGHUP means: the terminal was closed, or, by an old custom of daemons, the configuration is to be read again.

The terminal was closed if one that this process had when it began is gone: its controlling terminal, or one at its standard
input, output or error. A shell may send the signal a moment before the terminal goes, so that it is looked at again for a second.
In every other case, and always for a process that never had a terminal, as below systemd, the signal asks for a reload.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Seconds after the signal in which a terminal may go."""

POLL_SECONDS = 0.02

CLOSE_SECONDS = 5.0
"""Seconds for which a process that ends waits for a reload that is under way, which may wait for runs that end, too."""


class Terminals:
    """The terminals that this process has when this is made."""

    def __init__(self) -> None:
        self._descriptors = [os.dup(number) for number in (0, 1, 2) if _is_terminal(number)]
        try:
            self._descriptors.append(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError:
            pass  # it has no controlling terminal

    def are_gone(self) -> bool:
        """Whether one of them was closed."""
        poll = select.poll()
        for descriptor in self._descriptors:
            poll.register(descriptor, 0)  # a hang-up is reported without being asked for
        return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))

    def will_go(self, seconds: float = LOOK_SECONDS) -> bool:
        """Whether one of them is closed, or will be within `seconds`. Blocks for so long."""
        deadline = time.monotonic() + (seconds if self._descriptors else 0.0)
        while not (gone := self.are_gone()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return gone

    def close(self) -> None:
        """Forgets the terminals."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


class Hangups:
    """Decides what each SIGHUP of this process means, one after the other.

    Signals before a reload begins are one. One that comes during it has another follow: what was read may be old by then.
    """

    def __init__(self, on_closed: Callable[[], object], on_reload: Callable[[], object]) -> None:
        """Both are called in a thread of their own, which may block."""
        self._terminals = Terminals()
        self._on_closed, self._on_reload = on_closed, on_reload
        self._noted = False
        """Whether a signal came that no decision is for."""
        self._deciding: threading.Thread | None = None
        self._lock = threading.RLock()
        """Held for moments. A handler may interrupt another one, in the same thread."""

    def note(self) -> None:
        """Notes a signal. May be called in its handler."""
        with self._lock:
            self._noted = True
            if self._deciding is None or not self._deciding.is_alive():
                self._deciding = threading.Thread(target=self._decide, name="hangup", daemon=True)
                self._deciding.start()

    def close(self) -> None:
        """Ends, after a decision that is being made; a reload that takes longer ends with the process."""
        if (deciding := self._deciding) is not None:
            deciding.join(CLOSE_SECONDS)
        self._terminals.close()

    def _decide(self) -> None:
        while self._is_due():
            decided = self._on_closed if self._terminals.will_go() else self._on_reload
            self._noted = False
            decided()

    def _is_due(self) -> bool:
        """Whether there is anything to decide; if not, the next signal finds nobody at it."""
        with self._lock:
            if not self._noted:
                self._deciding = None
            return self._noted


class ReloadOnHangup:
    """Handles SIGHUP in its block, in the main thread, for a process that handles SIGTERM as a request to stop.

    A closed terminal goes to the handler of SIGTERM, as the SIGHUP that it is. One that is ignored, as below `nohup`, stays so.
    """

    def __init__(self, on_reload: Callable[[], object]) -> None:
        self._hangups = Hangups(self._close, on_reload)
        self._closed = False

    def __enter__(self) -> ReloadOnHangup:
        self._former = signal.getsignal(signal.SIGHUP)
        if self._former is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGHUP, self._former)
        self._hangups.close()

    def _close(self) -> None:
        self._closed = True
        os.kill(os.getpid(), signal.SIGHUP)  # handlers run in the main thread

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._closed:
            self._hangups.note()
            return
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler):
            handler(number, frame)
        else:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGHUP)


def note_hangup() -> None:
    """Logs what a signal does not change, for `ReloadOnHangup` of a role whose file is read at its start alone."""
    logger.warning(
        "SIGHUP: keys and tokens are read again in any case; this role's file is read when it is started again"
    )


def _is_terminal(number: int) -> bool:
    try:
        return os.isatty(number)
    except OSError:  # it is closed
        return False
