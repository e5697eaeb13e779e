"""The lag monitor sees a loop that is blocked, and says so."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config import LagConfig
from orchestrator.lag import EventLoopLagMonitor, quantile

BLOCKED_SECONDS = 0.15


async def sample(config: LagConfig, block_seconds: float) -> EventLoopLagMonitor:
    ticks = 0
    enough = asyncio.Event()

    def on_tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks >= 5:
            enough.set()

    monitor = EventLoopLagMonitor(config, on_tick)
    task = asyncio.create_task(monitor.run())
    await asyncio.sleep(0)  # The monitor sleeps now.
    time.sleep(block_seconds)  # noqa: ASYNC251 - blocking the loop is what is measured
    await asyncio.wait_for(enough.wait(), 10)
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
    assert monitor.take().n == 1


async def test_the_distribution_is_per_step() -> None:
    monitor = await sample(LagConfig(interval_seconds=0.005), 0.0)
    assert set(monitor.take().metrics()) == {
        f"event_loop_lag/{name}" for name in ("min", "mean", "median", "p90", "p99", "max", "n")
    }


@given(lags=st.lists(st.floats(0, 100), min_size=1, max_size=50), share=st.floats(0, 1))
def test_quantiles_are_numpys(lags: list[float], share: float) -> None:
    assert quantile(sorted(lags), share) == pytest.approx(float(np.quantile(lags, share)), abs=1e-9)
