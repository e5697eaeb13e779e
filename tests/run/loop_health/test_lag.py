"""The lag monitor measures how late a loop is, and warns of it: on a loop that is blocked, and by a clock that is played."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.run.config import LagConfig
from counterpoint.run.loop_health.blame import LateMoments
from counterpoint.run.loop_health.health import LoopMonitors
from counterpoint.run.loop_health.lag import (
    MAX_SAMPLES,
    EventLoopLagMonitor,
    LagDistribution,
    quantile,
    samples_of,
)
from counterpoint.run.loop_health.slow_spots import SlowSpots

BLOCKED_SECONDS = 0.15


class PlayedTime:
    """Stands for the modules `time` and `asyncio`: a monitor's sleeps end late by the given seconds, one after the other, and the
    one after them is cancelled."""

    def __init__(self, late: list[float]) -> None:
        self.now = 100.0
        self._late = iter(late)

    def perf_counter(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        late = next(self._late, None)
        if late is None:
            raise asyncio.CancelledError
        self.now += seconds + late


async def played(config: LagConfig, late: list[float], monkeypatch: pytest.MonkeyPatch) -> EventLoopLagMonitor:
    """Returns a monitor whose samples were late by so many seconds."""
    clock = PlayedTime(late)
    monkeypatch.setattr("counterpoint.run.loop_health.lag.time", clock)
    monkeypatch.setattr("counterpoint.run.loop_health.lag.asyncio", clock)
    monitor = EventLoopLagMonitor(config)
    with suppress(asyncio.CancelledError):
        await monitor.run()
    return monitor


async def test_a_blocked_loop_is_measured_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    config = LagConfig(interval_seconds=0.01, warn_max_seconds=BLOCKED_SECONDS / 3)
    ticked = asyncio.Event()
    monitor = EventLoopLagMonitor(config, ticked.set)
    task = asyncio.create_task(monitor.run())
    await asyncio.sleep(0)  # the monitor sleeps now
    time.sleep(BLOCKED_SECONDS)  # noqa: ASYNC251 - blocking the loop is what is measured
    await asyncio.wait_for(ticked.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    lag = monitor.take()
    assert lag.max >= BLOCKED_SECONDS - 0.011
    assert lag.min <= lag.median <= lag.p90 <= lag.p99 <= lag.max
    assert "warn_max_seconds" in caplog.text


async def test_a_stall_counts_for_as_long_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = LagConfig(interval_seconds=1.0, warn_p90_seconds=100.0, warn_max_seconds=200.0)
    monitor = await played(config, [0.0] * 50 + [150.0], monkeypatch)
    lag = monitor.take()
    assert (lag.n, lag.max) == (50 + 151, 150.0)  # seconds late: 150, 149, ..., 0
    assert (lag.median, lag.p90) == (50.0, 130.0)
    assert "warn_p90_seconds" in caplog.text
    assert "warn_max_seconds" not in caplog.text


async def test_a_distribution_is_of_the_time_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no sample has ended since, it is of the pending one."""
    monitor = await played(LagConfig(interval_seconds=1.0), [0.0, 0.5, 0.0], monkeypatch)
    assert monitor.take().n == 3
    pending = monitor.take()
    assert (pending.n, pending.max) == (1, 0.0)


def test_the_quantiles_of_a_loop_that_is_dead_for_three_sevenths_of_the_time_say_so() -> None:
    lag = LagDistribution.of([*(0.0005 for _ in range(2000)), 1.5], 0.001)
    assert (lag.n, lag.max) == (3501, 1.5)
    assert lag.median == 0.0005
    assert lag.p90 == pytest.approx(1.15, abs=0.002)
    assert lag.p99 == pytest.approx(1.465, abs=0.002)


@given(
    stalls=st.lists(st.integers(0, 50), min_size=1, max_size=20),
    interval=st.integers(1, 10),
)
def test_what_is_counted_is_what_one_sample_an_interval_would_have_found(stalls: list[int], interval: int) -> None:
    """Times are in exact units: of each stall, the moments due in it are looked at one by one."""
    expected: list[int] = []
    for stall in stalls:
        expected += [stall - due for due in range(stall + 1) if due % interval == 0]
    counted = [late for stall in stalls for late in samples_of(stall, interval)]
    assert counted == expected


def test_the_samples_of_one_stall_are_bounded() -> None:
    assert len(samples_of(1e9, 0.001)) == MAX_SAMPLES


def test_a_distribution_has_a_metric_for_each_number() -> None:
    assert set(LagDistribution.of([0.5], 1.0).metrics()) == {
        f"event_loop_lag/{name}" for name in ("min", "mean", "median", "p90", "p99", "max", "n")
    }


@given(lags=st.lists(st.floats(0, 100), min_size=1, max_size=50), share=st.floats(0, 1))
def test_quantiles_are_numpys(lags: list[float], share: float) -> None:
    assert quantile(sorted(lags), share) == pytest.approx(float(np.quantile(lags, share)), abs=1e-9)


def test_the_maximum_is_not_below_what_the_blame_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler sleeps while a stall begins."""
    health = LoopMonitors(LagConfig())
    seen = LagDistribution.of([0.26], 0.1)
    monkeypatch.setattr(health.lag, "take", lambda: seen)
    monkeypatch.setattr(health.blame, "take", lambda: SlowSpots(moments=1, longest=0.334))
    line = health.take_metrics()
    assert (line["event_loop_lag/max"], line["event_loop_lag/p99"]) == (0.334, seen.p99)


def test_of_late_moments_that_were_not_reported_the_longest_is_known() -> None:
    ended = LateMoments().plus(0.3, LateMoments()).plus(0.1, LateMoments())
    assert (ended.moments, ended.longest) == (2, 0.3)
    assert ended.seconds == pytest.approx(0.4)
    assert ended.plus(0.2, ended).longest == 0.2
