"""The lag monitor sees a loop that is blocked, and says so."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.loop_health.lag import MOST_SAMPLES, EventLoopLagMonitor, LagDistribution, quantile, samples_of
from run.config import LagConfig

BLOCKED_SECONDS = 0.15


async def sample(config: LagConfig, block_seconds: float, least_ticks: int = 5) -> EventLoopLagMonitor:
    ticks = 0
    enough = asyncio.Event()

    def on_tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks >= least_ticks:
            enough.set()

    monitor = EventLoopLagMonitor(config, on_tick)
    task = asyncio.create_task(monitor.run())
    await asyncio.sleep(0)  # The monitor sleeps now.
    time.sleep(block_seconds)  # noqa: ASYNC251 - blocking the loop is what is measured
    await asyncio.wait_for(enough.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return monitor


async def test_a_blocked_loop_is_measured_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    config = LagConfig(interval_seconds=0.01, warn_max_seconds=BLOCKED_SECONDS / 3)
    monitor = await sample(config, BLOCKED_SECONDS)
    lag = monitor.take()
    assert lag.n >= 5
    assert lag.max >= BLOCKED_SECONDS - 0.011
    assert lag.min <= lag.median <= lag.p90 <= lag.p99 <= lag.max
    assert lag.median < lag.max
    assert "warn_max_seconds" in caplog.text
    assert "warn_p90_seconds" not in caplog.text
    assert monitor.take().n < lag.n


async def test_a_stall_counts_for_as_long_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    config = LagConfig(interval_seconds=0.001, warn_p90_seconds=BLOCKED_SECONDS / 3)
    lag = (await sample(config, BLOCKED_SECONDS, least_ticks=20)).take()
    assert lag.n >= 20 + BLOCKED_SECONDS / config.interval_seconds - 2
    assert lag.p90 >= BLOCKED_SECONDS / 3
    assert "warn_p90_seconds" in caplog.text


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
    assert len(samples_of(1e9, 0.001)) == MOST_SAMPLES


async def test_the_distribution_is_per_step() -> None:
    monitor = await sample(LagConfig(interval_seconds=0.005), 0.0)
    assert set(monitor.take().metrics()) == {
        f"event_loop_lag/{name}" for name in ("min", "mean", "median", "p90", "p99", "max", "n")
    }


@given(lags=st.lists(st.floats(0, 100), min_size=1, max_size=50), share=st.floats(0, 1))
def test_quantiles_are_numpys(lags: list[float], share: float) -> None:
    assert quantile(sorted(lags), share) == pytest.approx(float(np.quantile(lags, share)), abs=1e-9)
