"""systemd's notification protocol, both ends: a role calls `notify`, and a supervisor reads a `NotifySocket`.

A role sends to `$NOTIFY_SOCKET`, whether it runs under systemd, in a container or under a keeper of `cluster`; without that
variable it sends nothing. Source of the protocol: sd_notify(3).
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from counterpoint.transport.printable import clipped
from counterpoint.transport.process.keeper.notify_socket import NotifySocket as NotifySocket

logger = logging.getLogger(__name__)

LONGEST_PERIOD_SECONDS = 5.0
"""Longest time between two heartbeats, even if the supervisor allows a longer one, so that silence can be shown soon."""

_failure = ""
"""Why the last message could not be sent, if that was logged; empty if it was sent."""

_full_since = math.inf
"""The time since when the receiver's queue has been full, on the monotonic clock; infinite if it is not."""

FULL_SECONDS = 30.0
"""How long the receiver's queue may be full before that is logged. A busy machine fills it now and then."""

READY_AGAIN_SECONDS = 1.0
"""Time between two attempts to send `READY=1`."""

MAX_STATUS = 1000
"""Characters of a status."""

MAX_FAILURE = 800
"""Characters of a failure's reason."""

_stopping = threading.Event()
"""Whether `STOPPING=1` was sent after the last call of `notify_ready`."""


def notify(state: str) -> bool:
    """Sends one or several lines: `READY=1`, `STATUS=...`, `WATCHDOG=1`, `STOPPING=1`, `EXTEND_TIMEOUT_USEC=...`.

    Never blocks, so that it may be called on an event loop. Returns whether the message was sent: False without
    `$NOTIFY_SOCKET`, and when the receiver is gone or does not keep up. The first failure in a row is logged; of a
    receiver that does not keep up, once that has lasted.
    """
    global _failure, _full_since
    if "STOPPING=1" in state:
        _stopping.set()
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(state.encode(errors="backslashreplace"), socket.MSG_DONTWAIT, _path(address))
        except OSError as error:
            if isinstance(error, BlockingIOError):
                _full_since = min(_full_since, time.monotonic())
                if time.monotonic() - _full_since < FULL_SECONDS:
                    return False
            if error.strerror != _failure:
                logger.warning("cannot notify the supervisor at $NOTIFY_SOCKET of %r: %s", state, error.strerror)
            _failure = error.strerror or ""
            return False
    _failure, _full_since = "", math.inf
    return True


def notify_ready() -> None:
    """Sends `READY=1`. If that fails, as when the receiver does not keep up, a thread sends it again until it arrives.

    The thread gives up once this process says that it stops. Heartbeats cannot do its work: a supervisor that waits for a role
    to be ready need not expect any.
    """

    def send_again() -> None:
        while "NOTIFY_SOCKET" in os.environ and not _stopping.wait(READY_AGAIN_SECONDS) and not notify("READY=1"):
            pass

    _stopping.clear()
    if not notify("READY=1") and "NOTIFY_SOCKET" in os.environ:
        threading.Thread(target=send_again, name="sending READY again", daemon=True).start()


def notify_failure(reason: str) -> None:
    """Sends why this process is about to end, for people: its end is told with the newest reason. Unsupervised, nothing."""
    notify(f"X_FAILURE={clipped(' '.join(reason.split()), MAX_FAILURE)}")


def watchdog_seconds() -> float | None:
    """Returns the supervisor's limit on silence, from `$WATCHDOG_USEC`; None if it expects no heartbeat."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    return int(microseconds) / 1e6 if microseconds.isdigit() and int(microseconds) > 0 else None


def period_of(limit: float) -> float:
    """Returns the time between two heartbeats under that limit on silence."""
    return min(limit / 3, LONGEST_PERIOD_SECONDS)


class Heartbeat:
    """Sends `WATCHDOG=1`, and any problem.

    Call it from the part of a role whose progress shows that the role is alive.
    """

    def __init__(self) -> None:
        limit = watchdog_seconds()
        self.period = None if limit is None else period_of(limit)
        """Seconds between two heartbeats; None if no supervisor expects any."""
        self._beaten = -math.inf
        self._trouble = ""

    def report(self, trouble: str) -> None:
        """Sends the problem that keeps the role from its work, in one line for people; empty once it is over.

        Sends only changes.
        """
        if trouble != self._trouble and notify(f"X_TROUBLE={' '.join(trouble.split())}"):
            self._trouble = trouble

    def beat(self) -> None:
        """Sends a heartbeat if a `period` has passed since the last one. Call it at least that often."""
        now = time.monotonic()
        if self.period is not None and now - self._beaten >= self.period:
            self._beaten = now
            notify("WATCHDOG=1")


class StatusLine:
    """What a role does at present, in one line for people, as `STATUS=`. Sends only changes."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, text: str) -> None:
        """Shows `text`, or its beginning."""
        text = clipped(" ".join(text.split()), MAX_STATUS)
        if text != self._shown and notify(f"STATUS={text}"):
            self._shown = text


@contextmanager
def beating() -> Iterator[None]:
    """Sends heartbeats from a thread while the block runs, for a role whose loop may take minutes for one step.

    They show that the process runs, not that its loop makes progress.
    """
    heartbeat, stop = Heartbeat(), threading.Event()

    def beat() -> None:
        heartbeat.beat()
        while not stop.wait(heartbeat.period):
            heartbeat.beat()

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    if heartbeat.period is not None:
        thread.start()
    try:
        yield
    finally:
        stop.set()


def _path(address: str) -> str:
    """Returns an address as the kernel expects it: `@name` is a name in the abstract namespace."""
    return "\0" + address[1:] if address.startswith("@") else address
