"""One server's activity for this pool: requests, tokens, and the times when it was busy, loading or out of service.

The pool and the server's monitor note it on the loop as it happens, and each note costs a few additions. `take_spans` gives it
since the last call as spans of a step, `described` the state and the totals for `fleet.json`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from counterpoint.inference.base import ServerStatus
from counterpoint.inference.clients.capacity import Observation
from counterpoint.transport.printable import clipped
from counterpoint.transport.records import Turn
from counterpoint.transport.telemetry import spans
from counterpoint.transport.telemetry.intervals import BusyIntervals
from counterpoint.transport.telemetry.spans import AttributeValue, Span

ROLE = "inference"

MAX_EVENTS = 64
"""Weight loads, probes and outages that it remembers until `take_spans`."""

MAX_REASON = 300
"""Characters of a reason in `fleet.json`."""


class ServerActivity:
    """The activity of one server. `clock` gives Unix seconds and never goes back."""

    def __init__(self, url: str, clock: Callable[[], float] = spans.now) -> None:
        self._url = url
        self._clock = clock
        self._in_flight = 0
        self._busy_since = 0.0
        self._busy = BusyIntervals()
        self._events: deque[tuple[str, float, float, dict[str, AttributeValue]]] = deque(maxlen=MAX_EVENTS)
        self._out_since: float | None = None
        self._instance: str | None = None
        self._totals = dict.fromkeys(
            (
                "requests",
                "failures",
                "prompt_tokens",
                "cached_tokens",
                "cacheable_tokens",  # those of prompts with a known number of cached tokens
                "completion_tokens",
                "outages",
                "restarts",
            ),
            0,
        )
        self._last_outage: dict[str, Any] | None = None
        self.load: Observation | None = None
        """The last load that the server has reported."""

    def request(self) -> ServerActivity:
        """Returns a block around a request at the server, to count it. Blocks may overlap.

        A method with `contextmanager` would make four objects for each turn.
        """
        return self

    def __enter__(self) -> None:
        if not self._in_flight:
            self._busy_since = self._clock()
        self._in_flight += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._totals["requests"] += 1
        elif issubclass(kind, Exception) and kind is not TimeoutError:
            # The request's own deadline ends it as a cancellation.
            self._totals["failures"] += 1
        self._in_flight -= 1
        if not self._in_flight:
            self._busy.add(self._busy_since, self._clock())

    @property
    def ended_requests(self) -> int:
        """Requests that the server has answered, or that failed there, without cancelled ones."""
        return self._totals["requests"] + self._totals["failures"]

    @contextmanager
    def timed(self, name: str, version: int) -> Iterator[None]:
        """Notes that the server was busy with `load` or `probe`."""
        begin = self._clock()
        try:
            yield
        finally:
            self._events.append((name, begin, self._clock(), {"version": version}))

    def generated(self, turn: Turn) -> None:
        """Counts the tokens of a turn."""
        self._totals["prompt_tokens"] += len(turn.prompt_ids)
        if turn.cached_tokens is not None:
            self._totals["cached_tokens"] += turn.cached_tokens
            self._totals["cacheable_tokens"] += len(turn.prompt_ids)
        self._totals["completion_tokens"] += len(turn.completion_ids)

    def went_out(self, reason: str, since: float) -> None:
        """Notes that the server went out of service, or was never in it. `since`, in Unix seconds, is for people."""
        if self._out_since is None:
            self._out_since = self._clock()
            self._totals["outages"] += self._instance is not None
        self._last_outage = {"time": since, "reason": clipped(reason, MAX_REASON)}

    def serves(self, instance: str) -> None:
        """Notes that the server serves, by the process `instance`."""
        self._totals["restarts"] += self._instance not in (None, instance)
        self._instance = instance
        self._end_outage(goes_on=False)

    def _end_outage(self, goes_on: bool) -> None:
        if self._out_since is not None:
            reason = self._last_outage["reason"] if self._last_outage else ""
            end = self._clock()
            self._events.append(("out", self._out_since, end, {"reason": reason}))
            self._out_since = end if goes_on else None

    def take_spans(self, run: str, step: int) -> list[Span]:
        """Returns the activity since the last call, up to now. A span still in progress is split there."""
        if self._in_flight:
            now = self._clock()
            self._busy.add(self._busy_since, now)
            self._busy_since = now
        self._end_outage(goes_on=True)
        server: dict[str, AttributeValue] = {"server": self._url}
        taken = [
            Span(ROLE, "serve", each.begin, each.end, run, step, each.busy, attributes=server)
            for each in self._busy.take()
        ]
        taken += [
            Span(ROLE, name, begin, end, run, step, attributes=server | attributes)
            for name, begin, end, attributes in self._events
        ]
        self._events.clear()
        return taken

    def described(self, status: ServerStatus) -> dict[str, Any]:
        """Returns the server's object in `fleet.json`, without rates."""
        load = self.load
        return {
            "url": self._url,
            "state": status.state,
            "reason": clipped(status.reason, MAX_REASON),
            "version": status.version,
            "in_flight": status.in_flight,
            "limit": status.cap,
            **self._totals,
            "last_outage": self._last_outage,
            "engine": None
            if load is None
            else {
                "running": load.running,
                "waiting": load.waiting,
                "cache_use": load.cache_use,
                "preemptions": load.preemptions,
            },
        }
