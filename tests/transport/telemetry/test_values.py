"""Values of metrics: bounded, cumulative, and the same stalls as the lag monitor counts."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.run.loop_health.lag import MAX_SAMPLES, samples_of
from counterpoint.transport.telemetry.lines import LineReader
from counterpoint.transport.telemetry.metric import DROPPED_SERIES, LineName, Metric
from counterpoint.transport.telemetry.values import OTHER, Histogram, MetricValues

COUNT = Metric("counterpoint_things", "counter", "things", labels=("kind",), most_series=3)
LEVEL = Metric("counterpoint_level", "gauge", "level", labels=("kind",), most_series=3)
TIME = Metric("counterpoint_time_seconds", "histogram", "time", "seconds", buckets=(0.1, 1.0))
ROWS = (
    LineName("things/<kind>", "things", COUNT),
    LineName("level/<kind>/now", "level", LEVEL),
    LineName("seconds", "time", TIME),
    LineName("note", "not shown"),
)


def values() -> MetricValues:
    return MetricValues((COUNT, LEVEL, TIME, DROPPED_SERIES))


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.0, 0.1, 0.2, 1.0, 1.1):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == pytest.approx(2.4)


@settings(max_examples=200)
@given(st.integers(0, 3000), st.sampled_from([0.125, 0.25, 1.0]))
def test_a_stall_counts_as_the_samples_of_the_lag_monitor(eighths: int, interval: float) -> None:
    lag = eighths / 64
    plain, quick = Histogram((0.001, 0.25, 1.0, 10.0)), Histogram((0.001, 0.25, 1.0, 10.0))
    for sample in samples_of(lag, interval):
        plain.observe(sample)
    quick.observe_stall(lag, interval, MAX_SAMPLES)
    assert quick.counts == plain.counts
    assert quick.total == pytest.approx(plain.total)


def test_a_stall_of_days_counts_for_its_most_samples_at_once() -> None:
    histogram = Histogram((0.1, 1.0))
    histogram.observe_stall(1e7, 0.1, MAX_SAMPLES)
    assert histogram.counts == [0, 0, MAX_SAMPLES]


def test_further_series_of_a_counter_are_counted_together() -> None:
    held = values()
    for number in range(10):
        held.add(COUNT, 1, f"kind {number}")
    shown = held.read()[COUNT]
    assert len(shown) == COUNT.most_series + 1
    assert shown[(OTHER,)] == 7
    assert sum(float(str(value)) for value in shown.values()) == 10
    assert held.read()[DROPPED_SERIES][()] == 7


def test_further_series_of_a_gauge_are_left_out() -> None:
    held = values()
    held.replace("line", {(LEVEL, (f"kind {number}",)): number for number in range(10)})
    held.set(LEVEL, 1, "x" * 1000)
    shown = held.read()
    assert len(shown[LEVEL]) == LEVEL.most_series
    assert max(len(label) for (label,) in shown[LEVEL]) == 128
    assert shown[DROPPED_SERIES][()] == 8


def test_what_has_no_value_yet_is_absent_but_counts_begin_at_zero() -> None:
    shown = values().read()
    assert LEVEL not in shown
    assert COUNT not in shown
    assert isinstance(shown[TIME][()], Histogram)


def test_a_line_sets_gauges_adds_to_counters_and_observes_times() -> None:
    held = values()
    reader = LineReader(held, ROWS)
    reader.take({"things/a": 2, "level/a/now": 1.5, "seconds": 0.5, "note": 1, "unknown/name": 9}, "run")
    reader.take(
        {"things/a": 3, "level/b/now": 2.5, "seconds": 0.05, "things/b": float("nan"), "level/c/now": "x"}, "run"
    )
    shown = held.read()
    assert shown[COUNT] == {("a",): 5}
    assert shown[LEVEL] == {("b",): 2.5}
    assert isinstance(time := shown[TIME][()], Histogram)
    assert time.counts == [1, 1, 0]


def test_lasting_gauges_stay_until_replaced() -> None:
    held = values()
    reader = LineReader(held, ROWS)
    reader.take({"level/a/now": 1}, "kept", lasting=True)
    reader.take({"level/b/now": 2}, "kept", lasting=True)
    assert held.read()[LEVEL] == {("a",): 1, ("b",): 2}


def test_a_label_that_has_left_is_forgotten() -> None:
    held = values()
    held.add(COUNT, 1, "a")
    held.add(COUNT, 1, "b")
    held.forget("kind", "a")
    assert held.read()[COUNT] == {("b",): 1}


def test_reading_while_another_thread_writes_sees_whole_values() -> None:
    held = values()
    stop = threading.Event()
    histogram = held.histogram(TIME)

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            held.replace("line", {(LEVEL, ("a",)): number, (LEVEL, ("b",)): number})
            held.add(COUNT, 1, str(number % 7))
            histogram.observe(0.5)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            levels = held.read().get(LEVEL, {})
            assert len(set(levels.values())) <= 1
    finally:
        stop.set()
        writer.join()
