"""The event loop's lag, sampled every millisecond and kept with its time, to compare it with what ran meanwhile.

The daemon's own monitor (`counterpoint/run/loop_health/lag.py`) samples ten times a second and keeps one step's distribution;
this one is for replays and benchmarks. Lag has the same definition in both: how much later than requested a sleeping coroutine
wakes.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from counterpoint.run.loop_health.lag import LagDistribution, samples_of

INTERVAL_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class LagSpan:
    """A named period from `start` to `end`, in seconds on the trace's clock."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end - self.start


class LagTrace:
    """Samples the running loop for as long as its `async with` block lasts. Times are seconds since it began."""

    def __init__(self) -> None:
        """Creates an empty trace."""
        self.times = array("d")
        """The time of each sample."""
        self.lags = array("d")
        """The lag of each sample in seconds; `lags[i]` belongs to `times[i]`."""
        self.spans: list[LagSpan] = []
        self._began = 0.0
        self._over = False

    async def __aenter__(self) -> LagTrace:
        """Starts the sampling."""
        self._began = time.perf_counter()
        self._task = asyncio.create_task(self._sample(), name="lag trace")
        await asyncio.sleep(0)  # so that the first sample waits before the block begins
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the sampling, after one more sample."""
        self._over = True
        await asyncio.wait([self._task])  # the last sample covers a span that ended just now

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Records the block as a span called `name`."""
        start = self.now()
        try:
            yield
        finally:
            self.spans.append(LagSpan(name, start, self.now()))

    def add(self, name: str, start: float, end: float) -> None:
        """Adds a span that was measured elsewhere, in seconds of `time.perf_counter`."""
        self.spans.append(LagSpan(name, start - self._began, end - self._began))

    def now(self) -> float:
        """Returns the seconds since the trace began."""
        return time.perf_counter() - self._began

    def distribution(self, *spans: LagSpan) -> LagDistribution:
        """Returns the distribution of the lags whose wait overlapped any of `spans`, or of all lags without `spans`.

        A sample belongs to the time that it waited. So a sample taken just after a span may count for it, as may those of the
        same stall that were due in the span. Raises `ValueError` if there is no sample.
        """
        lags = [
            lag
            for moment, latest in zip(self.times, self.lags, strict=True)
            for lag in samples_of(latest, INTERVAL_SECONDS)
            if not spans or any(moment >= span.start and moment - lag - INTERVAL_SECONDS <= span.end for span in spans)
        ]
        if not lags:
            raise ValueError("no sample was taken; the trace needs at least a millisecond")
        return LagDistribution.of_samples(lags)

    def less(self, pauses: Callable[[float, float], float]) -> LagTrace:
        """Returns a copy with each lag less `pauses(begin, end)` of its wait: the seconds in which the machine stood still.

        `begin` and `end` are in seconds of `time.perf_counter`.
        """
        trace = LagTrace()
        trace.spans, trace.times, trace._began = self.spans, self.times, self._began
        for moment, lag in zip(self.times, self.lags, strict=True):
            woken = self._began + moment
            trace.lags.append(max(0.0, lag - pauses(woken - lag - INTERVAL_SECONDS, woken)))
        return trace

    async def _sample(self) -> None:
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(INTERVAL_SECONDS)
            woken = time.perf_counter()
            self.times.append(woken - self._began)
            self.lags.append(max(0.0, woken - asked - INTERVAL_SECONDS))
            if self._over:
                return
