"""A paced thread rests for as long as it computed beside a main thread that computes, and hardly beside one that waits."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from counterpoint.transport.process import yield_gil
from counterpoint.transport.process.yield_gil import LONGEST_REST_SECONDS, SHORTEST_REST_SECONDS, yielding_gil


class Clocks:
    """CPU time of the paced thread and of the main one, and wall time; `take` spends them. Rests are noted, and take none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.own, self.main = 50.0, 100.0, 200.0
        self.rests: list[float] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(time, "thread_time", lambda: self.own)
        monkeypatch.setattr(time, "clock_gettime", lambda clock: self.main)
        monkeypatch.setattr(time, "sleep", self.rests.append)

    def take(self, computed: float, waited: float, main_computed: float) -> None:
        self.wall += computed + waited
        self.own += computed
        self.main += main_computed


def test_it_rests_for_as_long_as_it_computed_beside_a_busy_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    given = []
    for item in yielding_gil([0.001, 0.002, 0.003]):
        given.append(item)
        clocks.take(item, item, item)
    assert given == [0.001, 0.002, 0.003]
    assert clocks.rests == pytest.approx([0.001, 0.002])


def test_it_rests_two_fifths_of_that_where_the_main_thread_waits_four_fifths_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = Clocks(monkeypatch)
    for _ in yielding_gil(range(3)):
        clocks.take(0.002, waited=0.010, main_computed=0.002)
    assert clocks.rests == pytest.approx([0.0008, 0.0008], rel=0.05)


def test_it_does_not_rest_beside_a_main_thread_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    for _ in yielding_gil(range(9)):
        clocks.take(0.001, waited=0.02, main_computed=0.0)
    assert clocks.rests == []


def test_it_rests_where_it_never_waited_and_so_cannot_know(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    for _ in yielding_gil(range(2)):
        clocks.take(0.002, waited=0.0, main_computed=0.0)
    assert clocks.rests == pytest.approx([0.002])


def test_short_rests_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    for _ in yielding_gil(range(8)):
        clocks.take(0.3 * SHORTEST_REST_SECONDS, 0.01, 0.01)
    assert clocks.rests == pytest.approx([1.2 * SHORTEST_REST_SECONDS])


def test_the_time_it_waited_is_no_reason_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    for _ in yielding_gil("abc"):
        clocks.take(0.0, 0.5, 0.5)
    assert clocks.rests == []


async def test_a_thread_that_runs_a_loop_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    for _ in yielding_gil(range(3)):
        clocks.take(0.002, waited=0.0, main_computed=0.0)
    assert clocks.rests == []


def test_a_rest_is_short_however_long_an_item_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    for _ in yielding_gil(range(3)):
        clocks.take(0.5, 0.5, 0.5)
    assert clocks.rests == [LONGEST_REST_SECONDS] * 2


def test_the_main_threads_clock_is_that_of_the_thread_that_runs_the_tests() -> None:
    with ThreadPoolExecutor(1) as thread:
        before = thread.submit(yield_gil._main_thread_seconds).result()
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        assert thread.submit(yield_gil._main_thread_seconds).result() - before >= 0.02


def test_where_there_is_no_such_clock_it_rests_for_as_long_as_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    monkeypatch.setattr(sys, "platform", "darwin")
    for _ in yielding_gil(range(3)):
        clocks.take(0.002, waited=0.010, main_computed=0.0)
    assert clocks.rests == pytest.approx([0.002, 0.002])


@pytest.mark.parametrize("items", [[], ["only"]])
def test_there_is_no_rest_where_nothing_follows(monkeypatch: pytest.MonkeyPatch, items: list[str]) -> None:
    clocks = Clocks(monkeypatch)
    for _ in yielding_gil(items):
        clocks.take(0.001, 0.001, 0.001)
    assert clocks.rests == []
