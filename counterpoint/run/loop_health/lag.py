"""Measures the event loop's lag: how much later than asked a sleeping coroutine wakes.

It samples ten times a second from start to end of the daemon. Each step takes the distribution since the last one.

A sampler that sleeps takes one sample of a stall, however long, so quantiles over such samples do not show how long the loop was
blocked ("coordinated omission", Gil Tene, "How NOT to Measure Latency", 2015). So a late sample stands for all samples that were
due while it waited, as in HdrHistogram's `recordValueWithExpectedInterval`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from counterpoint.run.config import LagConfig
from counterpoint.transport.telemetry.metric import PROMPT_SECONDS, Metric
from counterpoint.transport.telemetry.values import Histogram

logger = logging.getLogger(__name__)

LAG = Metric(
    "counterpoint_event_loop_lag_seconds",
    "histogram",
    "how late the event loop was, ten times a second; a stall counts as all the samples that were due meanwhile",
    "seconds",
    buckets=PROMPT_SECONDS,
)

MAX_SAMPLES = 100_000
"""Most samples that one stall counts for: counting those of a process stopped for days would block it again."""


def samples_of(lag: float, interval: float) -> list[float]:
    """Returns one lag per `interval` during which the loop was late by `lag`, in the unit of the arguments, `lag` first.

    HdrHistogram leaves out the last one if it is less than `interval`; here it counts, as it was late, too.
    """
    return [lag - number * interval for number in range(min(int(lag / interval) + 1, MAX_SAMPLES))]


@dataclass(frozen=True, slots=True)
class LagDistribution:
    """Distribution of lags over time, in seconds: a stall counts in proportion to its length."""

    min: float
    mean: float
    median: float
    p90: float
    p99: float
    max: float
    n: int

    @classmethod
    def of(cls, lags: Iterable[float], interval_seconds: float) -> LagDistribution:
        """Computes it from at least one lag of a sampler that sleeps `interval_seconds` between samples."""
        return cls.of_samples(sample for lag in lags for sample in samples_of(lag, interval_seconds))

    @classmethod
    def of_samples(cls, samples: Iterable[float]) -> LagDistribution:
        """Computes it from at least one sample, all of equal weight."""
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
        """Returns the metrics `event_loop_lag/...`, in seconds; `n` is a count."""
        return {f"event_loop_lag/{name}": value for name, value in asdict(self).items()}


class EventLoopLagMonitor:
    """Samples the lag of the loop it runs on. `on_tick` is called after each sample (the watchdog's heartbeat)."""

    def __init__(self, config: LagConfig | None = None, on_tick: Callable[[], None] | None = None) -> None:
        """Samples as `config` says; without one, ten times a second."""
        self._config = config or LagConfig()
        self._on_tick = on_tick
        self._lags: list[float] = []
        self.histogram = Histogram(LAG.buckets)
        """The histogram of all samples since the start, as `LagDistribution` counts them."""
        self._due = time.perf_counter()
        """The time when the next sample is due."""

    async def run(self) -> None:
        """Samples until cancelled."""
        while True:
            self._due = time.perf_counter() + self._config.interval_seconds
            await asyncio.sleep(self._config.interval_seconds)
            # Timers of uvloop have a resolution of a millisecond and may fire a millisecond early.
            lag = self._overdue()
            self._lags.append(lag)
            self.histogram.observe_stall(lag, self._config.interval_seconds, MAX_SAMPLES)
            if self._on_tick is not None:
                self._on_tick()

    def take(self) -> LagDistribution:
        """Returns the distribution since the last call. Warns if it exceeds a threshold.

        Without a complete sample, it is the lag so far of the pending one.
        """
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
    """Returns a quantile, interpolated linearly, as numpy does by default.

    Without numpy, whose first call imports modules for 100 ms on the loop that is measured.
    """
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
