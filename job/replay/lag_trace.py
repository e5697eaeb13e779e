"""The event loop's lag, sampled every millisecond and kept with its time, so that it can be laid against what ran meanwhile.

The daemon's own monitor (`orchestrator/loop_health/lag.py`) samples ten times a second and keeps one step's distribution;
this is its finer sibling for replays and benchmarks. Both mean the same by lag: how much later than asked a sleeping
coroutine wakes.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from orchestrator.loop_health.lag import LagDistribution, samples_of

INTERVAL_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran from `start` to `end`, seconds on the trace's clock."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class LagTrace:
    """Samples the running loop for as long as its `async with` block lasts. Times are seconds since it began."""

    def __init__(self) -> None:
        self.times = array("d")
        """When each sample was taken."""
        self.lags = array("d")
        """How late it was, in seconds; `lags[i]` belongs to `times[i]`."""
        self.spans: list[Span] = []
        self._over = False

    async def __aenter__(self) -> LagTrace:
        self._began = time.perf_counter()
        self._task = asyncio.create_task(self._sample(), name="lag trace")
        await asyncio.sleep(0)  # the first sample waits already when the block begins
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        await asyncio.wait([self._task])  # the last sample covers a span that ended just now

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Marks the block as `name`."""
        start = self.now()
        try:
            yield
        finally:
            self.spans.append(Span(name, start, self.now()))

    def now(self) -> float:
        """Seconds since the trace began."""
        return time.perf_counter() - self._began

    def distribution(self, *spans: Span) -> LagDistribution:
        """The distribution of the lags whose wait overlapped any of `spans`, or of all lags without `spans`. A sample belongs to
        the time that it waited, so one taken just after a span may count for it, as may those of the same stall that were due in
        the span. Raises `ValueError` if there is no sample."""
        lags = [
            lag
            for moment, latest in zip(self.times, self.lags, strict=True)
            for lag in samples_of(latest, INTERVAL_SECONDS)
            if not spans or any(moment >= span.start and moment - lag - INTERVAL_SECONDS <= span.end for span in spans)
        ]
        if not lags:
            raise ValueError("no sample was taken; the trace needs at least a millisecond")
        return LagDistribution.of_samples(lags)

    async def _sample(self) -> None:
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(INTERVAL_SECONDS)
            woken = time.perf_counter()
            self.times.append(woken - self._began)
            self.lags.append(max(0.0, woken - asked - INTERVAL_SECONDS))
            if self._over:
                return
