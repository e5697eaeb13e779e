"""The fine lag trace: a loop that is blocked for a while is late by that while, and only then."""

from __future__ import annotations

import asyncio
import time

import pytest

from perf.lag_trace import LagTrace, Span


async def test_a_block_is_seen_in_its_span_and_in_no_other() -> None:
    async with LagTrace() as trace:
        with trace.span("idle"):
            await asyncio.sleep(0.03)
        await asyncio.sleep(0.005)
        with trace.span("blocked"):
            time.sleep(0.05)  # noqa: ASYNC251  (to block the loop is the point)
            await asyncio.sleep(0.005)
    idle, blocked = trace.spans
    assert [idle.name, blocked.name] == ["idle", "blocked"]
    # A machine that pauses is late, too, but what slept on the loop is there whatever else is.
    assert trace.distribution(blocked).max >= 0.9 * (blocked.seconds - 0.01)
    assert trace.distribution().n == len(trace.lags)
    assert trace.distribution(idle).n + trace.distribution(blocked).n <= trace.distribution().n


async def test_no_sample_is_an_error_and_not_a_zero() -> None:
    async with LagTrace() as trace:
        await asyncio.sleep(0.01)
    with pytest.raises(ValueError, match="no sample was taken"):
        trace.distribution(Span("later", 100.0, 101.0))
