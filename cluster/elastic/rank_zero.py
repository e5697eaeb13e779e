"""What rank 0 of a round says of itself by systemd's protocol: its process, its readiness, its heartbeats, and its exit code.

`service` has one for each round, so that nothing of an earlier round is heard. torch's agent tells only whether ranks succeeded.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from cluster.notify import NotifySocket


class RankZero:
    """Listens to the ranks of one round; it is about rank 0 only if that is one of this node's."""

    def __init__(self, silence_seconds: float | None) -> None:
        self._socket = NotifySocket()
        self._silence_seconds = silence_seconds
        self._began = self._heard = time.monotonic()
        self.pid: int | None = None
        self.is_ready = False
        self.code: int | None = None
        """Its exit code; that of another rank if this means the same on every rank."""
        self._told = False

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which the ranks find this."""
        limit = self._silence_seconds
        watchdog = {} if limit is None else {"WATCHDOG_USEC": str(int(limit * 1e6))}
        return {"NOTIFY_SOCKET": self._socket.address} | watchdog

    def hear(self) -> None:
        """Takes what was said."""
        while (message := self._socket.receive()) is not None:
            if message.get("MAINPID", "").isdecimal():
                self.pid = int(message["MAINPID"])
            if message.get("EXIT_STATUS", "").isdecimal():
                self.code = int(message["EXIT_STATUS"])
            self.is_ready |= message.get("READY") == "1"
            if self.is_ready:
                self._heard = time.monotonic()

    def trouble(self, ready_seconds: float) -> str:
        """Returns what is wrong with it, for a person; empty if nothing is. Call `hear` before."""
        now = time.monotonic()
        if self.code is not None:
            return ""  # it ends
        if not self.is_ready and now - self._began > ready_seconds:
            return f"rank 0 was not ready within {ready_seconds:g} s"
        if self.is_ready and self._silence_seconds is not None and now - self._heard > self._silence_seconds:
            return f"rank 0 was silent for {self._silence_seconds:g} s"
        return ""

    def ask_to_end(self) -> bool:
        """Sends it SIGTERM, once; returns False if it is not there to be asked."""
        if self.pid is None:
            return False
        if not self._told:
            self._told = True
            with suppress(ProcessLookupError):  # it has died, and torch's agent will notice
                os.kill(self.pid, signal.SIGTERM)
        return True

    def close(self) -> None:
        """Frees the socket."""
        self._socket.close()
