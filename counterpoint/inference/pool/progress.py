"""Whether a server makes progress with a pool's requests: it answers, or it computes tokens. Pure.

A long completion may take minutes, so silence alone proves nothing. But the engine reports how many requests it has and how
many tokens it has computed, including those of other pools.
"""

from __future__ import annotations

from counterpoint.inference.clients.capacity import Observation

ABSENT_SECONDS = 30.0
"""Seconds that a server may answer no request while its engine has none: something before the engine holds them back."""

STUCK_SECONDS = 120.0
"""Seconds that it may answer none while its engine has requests and computes no token. On a CPU one step may take a minute.
Each time that it takes longer, the limit doubles from then on."""


class ServerProgress:
    """The progress of one server, as its monitor observes it from time to time.

    `longest` is the deadline of a request, in seconds. After more than `longest_pause` seconds without a look all counts anew:
    this process was stopped, and perhaps the server, too.
    """

    def __init__(self, longest: float, longest_pause: float) -> None:
        self._longest = longest
        self._longest_pause = longest_pause
        self._stuck_seconds = STUCK_SECONDS
        self.begin()

    def begin(self) -> None:
        """Begins to count, when the server begins to serve."""
        self._looked_at = 0.0
        self._answered: int | None = None
        self._answered_at = self._computed_at = 0.0
        self._last: Observation | None = None
        """The last report of its load, or None before the first."""
        self._reported_at = 0.0

    def observe(self, now: float, requests: int, answered: int, seen: Observation | None) -> str:
        """Returns why the server is not to be used any longer, for a person, or empty if it is.

        `now` is in seconds. `requests` are at it, and `answered` is the number that it has ever answered. `seen` is its report,
        None if it gave none this time.
        """
        paused = now - self._looked_at > self._longest_pause
        self._looked_at = now
        if not requests or answered != self._answered or paused:
            self._answered, self._answered_at, self._computed_at = answered, now, now
        if seen is not None:
            if self._last is not None and seen.tokens != self._last.tokens:
                self._computed_at = now
            self._last, self._reported_at = seen, now
        what = f"it answered none of {requests} requests for"
        if now - self._answered_at >= self._longest:
            return f"{what} request_timeout_seconds = {self._longest:g}"
        if self._last is None:
            return ""
        if not self._last.held and now - self._computed_at >= ABSENT_SECONDS:
            return f"{what} {ABSENT_SECONDS:g} s, and its engine has none: something between here and there holds them back"
        if now - self._computed_at >= self._stuck_seconds:
            did = (
                "its engine computed no token"
                if self._reported_at > self._computed_at
                else "it reported nothing of its engine"
            )
            found = f"{what} {self._stuck_seconds:g} s, and {did} meanwhile"
            self._stuck_seconds *= 2
            return found
        return ""
