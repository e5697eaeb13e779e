"""Intervals stay bounded and lose no busy second; overlapping ones are counted once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.transport.telemetry.intervals import BusyIntervals, Interval, busy_seconds

whole = st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (float(pair[0]), float(sum(pair))))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=60), st.integers(2, 8))
@settings(max_examples=100)
def test_joined_intervals_keep_the_busy_seconds(steps: list[tuple[int, int]], most: int) -> None:
    busy, now, added = BusyIntervals(most), 0.0, 0.0
    for gap, length in steps:
        busy.add(now + gap, now + gap + length)
        now, added = now + gap + length, added + length
    taken = busy.take()
    assert len(taken) <= most
    assert sum(each.busy for each in taken) == pytest.approx(added)
    assert all(before.end <= after.begin for before, after in pairwise(taken))
    assert busy_seconds(taken, 0.0, now) == pytest.approx(added)
    assert busy.take() == []


@given(st.lists(whole, max_size=20), whole)
@settings(max_examples=100)
def test_busy_seconds_are_the_length_of_the_union(
    pairs: list[tuple[float, float]], window: tuple[float, float]
) -> None:
    begin, end = window
    seconds = sum(any(first <= second < last for first, last in pairs) for second in range(int(begin), int(end)))
    intervals = [Interval(first, last, last - first) for first, last in pairs]
    assert busy_seconds(intervals, begin, end) == pytest.approx(seconds)


def test_of_joined_intervals_the_busy_share_counts() -> None:
    joined = Interval(0.0, 10.0, 5.0)
    assert busy_seconds([joined], 0.0, 4.0) == pytest.approx(2.0)
    assert busy_seconds([joined, Interval(0.0, 10.0, 3.0)], 0.0, 10.0) == pytest.approx(8.0)
    assert busy_seconds([joined, Interval(0.0, 10.0, 9.0)], 0.0, 10.0) == pytest.approx(10.0)
