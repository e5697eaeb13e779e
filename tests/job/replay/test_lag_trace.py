"""The fine lag trace: a loop that is blocked for a while is late by that while, and only then."""

from __future__ import annotations

import asyncio
import time

import pytest

from counterpoint.job.replay.lag_trace import INTERVAL_SECONDS, LagSpan, LagTrace


async def test_a_block_is_seen_in_its_span() -> None:
    async with LagTrace() as trace:
        await asyncio.sleep(0.005)
        with trace.span("blocked"):
            began = time.perf_counter()
            time.sleep(0.05)  # noqa: ASYNC251  (to block the loop is the point)
            slept = time.perf_counter() - began
            await asyncio.sleep(0.005)
    (blocked,) = trace.spans
    assert blocked.name == "blocked"
    assert blocked.seconds >= slept
    # The sample that was waited for meanwhile is due within its interval; a machine that pauses only makes it later.
    assert trace.distribution(blocked).max >= 0.9 * (slept - INTERVAL_SECONDS)
    # It counts for as long as it was.
    assert trace.distribution().n >= len(trace.lags) + slept / INTERVAL_SECONDS - 2
    assert trace.distribution(blocked).median >= slept / 3


async def test_a_span_at_the_very_end_has_a_sample() -> None:
    async with LagTrace() as trace:
        with trace.span("short"):
            pass
    assert trace.distribution(*trace.spans).n >= 1


def test_a_sample_belongs_to_the_spans_that_its_wait_overlaps() -> None:
    trace = LagTrace()
    trace.times.extend([1.0, 2.0, 3.0, 4.0])
    trace.lags.extend([0.1, 0.2, 0.9, 0.4])
    first, second, gap = LagSpan("first", 0.95, 1.5), LagSpan("second", 2.05, 2.5), LagSpan("gap", 1.1, 1.7)
    assert trace.distribution().n == pytest.approx(1600, abs=5)
    assert trace.distribution(first).max == 0.1
    # The third was waited for from 2.099 on and came after the end of the span; so did those due from then to its end.
    within = trace.distribution(second)
    assert within.max == 0.9
    assert within.min == pytest.approx(0.5, abs=0.002)
    assert within.n == pytest.approx(400, abs=2)
    assert trace.distribution(first, second).n == trace.distribution(first).n + within.n
    # Samples that waited through the end of one span and the beginning of another are of both, and counted once.
    before = trace.distribution(LagSpan("before", 2.0, 2.2), second)
    assert before.n == pytest.approx(within.n + 200, abs=5)
    with pytest.raises(ValueError, match="no sample was taken"):
        trace.distribution(gap)


async def test_no_sample_is_an_error_and_not_a_zero() -> None:
    async with LagTrace() as trace:
        await asyncio.sleep(0.01)
    with pytest.raises(ValueError, match="no sample was taken"):
        trace.distribution(LagSpan("later", 100.0, 101.0))


def test_a_pause_of_the_machine_can_be_taken_from_the_lag_of_its_time() -> None:
    trace = LagTrace()
    trace.times.extend([1.0, 2.0, 3.0])
    trace.lags.extend([0.1, 0.2, 0.0])
    trace.spans = [LagSpan("all", 0.0, 4.0)]
    waits = []

    def pauses(begin: float, end: float) -> float:
        waits.append((begin, end))
        return 0.15

    calm = trace.less(pauses)
    assert waits == [pytest.approx((0.899, 1.0)), pytest.approx((1.799, 2.0)), pytest.approx((2.999, 3.0))]
    assert list(calm.lags) == pytest.approx([0.0, 0.05, 0.0])
    assert (calm.times, calm.spans) == (trace.times, trace.spans)
    assert list(trace.lags) == [0.1, 0.2, 0.0]
