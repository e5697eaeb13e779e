"""A paced thread rests for as long as it computed, never for what it waited, and not when all is done."""

from __future__ import annotations

import time

import pytest

from transport.process.yield_gil import LONGEST_REST_SECONDS, yielding_gil


class Clock:
    """The thread's CPU time, which the test spends, and the rests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computed = 100.0
        self.rests: list[float] = []
        monkeypatch.setattr(time, "thread_time", lambda: self.computed)
        monkeypatch.setattr(time, "sleep", self.rests.append)


def test_it_rests_between_two_items_for_as_long_as_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    given = []
    for item in yielding_gil([0.001, 0.002, 0.003]):
        given.append(item)
        clock.computed += item
    assert given == [0.001, 0.002, 0.003]
    assert clock.rests == pytest.approx([0.001, 0.002])


def test_what_it_waited_is_no_reason_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    wall = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(wall)))
    assert list(yielding_gil("abc")) == ["a", "b", "c"]
    assert clock.rests == []


def test_a_rest_is_short_however_long_an_item_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for _ in yielding_gil(range(3)):
        clock.computed += 0.5
    assert clock.rests == [LONGEST_REST_SECONDS] * 2


@pytest.mark.parametrize("items", [[], ["only"]])
def test_there_is_no_rest_where_nothing_follows(monkeypatch: pytest.MonkeyPatch, items: list[str]) -> None:
    clock = Clock(monkeypatch)
    for _ in yielding_gil(items):
        clock.computed += 0.001
    assert clock.rests == []
