"""Measures the event loop's lag: how much later than asked a sleeping coroutine wakes.

Ten times a second, from start to end of the daemon, so that whatever blocks the loop shows. Each step takes the
distribution since the last one.

A sampler that sleeps until it is woken takes one sample of a stall, however long, and quantiles over such samples say nothing of
how long the loop stood still ("coordinated omission", Gil Tene, "How NOT to Measure Latency", 2015). So a late sample stands for
all that were due while it waited, as HdrHistogram's `recordValueWithExpectedInterval` counts it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from run.config import LagConfig

logger = logging.getLogger(__name__)


MAX_SAMPLES = 100_000
"""That one stall counts for, so that a process which was stopped for days is not held up again by counting them."""


def samples_of(lag: float, interval: float) -> list[float]:
    """The lags, in the unit of both arguments, of one sample each `interval` while the loop was late by `lag`, that one first.

    HdrHistogram leaves out the last one where it is less than `interval`; what was due then was late all the same.
    """
    return [lag - number * interval for number in range(min(int(lag / interval) + 1, MAX_SAMPLES))]


@dataclass(frozen=True, slots=True)
class LagDistribution:
    """Lags, in seconds, over time: each stall counts for as long as it lasted."""

    min: float
    mean: float
    median: float
    p90: float
    p99: float
    max: float
    n: int

    @classmethod
    def of(cls, lags: Iterable[float], interval_seconds: float) -> LagDistribution:
        """Of at least one lag, each of a sampler that slept `interval_seconds` since it took the one before."""
        return cls.of_samples(sample for lag in lags for sample in samples_of(lag, interval_seconds))

    @classmethod
    def of_samples(cls, samples: Iterable[float]) -> LagDistribution:
        """Of at least one sample, each of as long a time."""
        values = sorted(samples)
        return cls(
            min=values[0],
            mean=sum(values) / len(values),
            median=quantile(values, 0.5),
            p90=quantile(values, 0.9),
            p99=quantile(values, 0.99),
            max=values[-1],
            n=len(values),
        )

    def metrics(self) -> dict[str, float | int]:
        """The metrics `event_loop_lag/...`, in seconds; `n` is a count."""
        return {f"event_loop_lag/{name}": value for name, value in asdict(self).items()}


class EventLoopLagMonitor:
    """Samples the lag of the loop it runs on. `on_tick` is called after each sample (the watchdog's heartbeat)."""

    def __init__(self, config: LagConfig, on_tick: Callable[[], None] | None = None) -> None:
        self._config = config
        self._on_tick = on_tick
        self._lags: list[float] = []
        self._due = time.perf_counter()
        """When the sleeper is to wake."""

    async def run(self) -> None:
        """Samples until cancelled."""
        while True:
            self._due = time.perf_counter() + self._config.interval_seconds
            await asyncio.sleep(self._config.interval_seconds)
            # Timers of uvloop have a resolution of a millisecond and may fire that much early.
            self._lags.append(self._overdue())
            if self._on_tick is not None:
                self._on_tick()

    def take(self) -> LagDistribution:
        """The distribution since the last call, of at least one sample: where none has ended, how late the pending one is so far.
        Warns of what exceeds the thresholds."""
        lags, self._lags = self._lags or [self._overdue()], []
        lag = LagDistribution.of(lags, self._config.interval_seconds)
        self._warn(lag)
        return lag

    def _overdue(self) -> float:
        return max(0.0, time.perf_counter() - self._due)

    def _warn(self, lag: LagDistribution) -> None:
        thresholds = (
            ("p90", lag.p90, self._config.warn_p90_seconds),
            ("p99", lag.p99, self._config.warn_p99_seconds),
            ("max", lag.max, self._config.warn_max_seconds),
        )
        for name, value, threshold in thresholds:
            if value > threshold:
                logger.warning(
                    "event loop lag: %s of %d samples is %.3f s, above lag.warn_%s_seconds = %g",
                    name, lag.n, value, name, threshold,
                )  # fmt: skip


def quantile(ordered: list[float], share: float) -> float:
    """Interpolated between neighbours, as numpy does by default. Not numpy itself: its first call imports for 100 ms, on the
    loop whose lag is asked for."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
