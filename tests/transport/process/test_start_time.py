"""A start has its time, and more while it computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from counterpoint.transport.process import start_time
from counterpoint.transport.process.notify import NotifySocket
from counterpoint.transport.process.start_time import LONGEST_STARTS, LOOK_SECONDS, StartTime, asking_for_time


class Clock:
    now = 1000.0
    share = 1.0
    """Of a core, which the start uses."""
    used = 0.0

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.used += seconds * self.share


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("counterpoint.transport.process.start_time.time.monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[NotifySocket]:
    listener = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", listener.address)
    yield listener
    listener.close()


def seconds_until_over(start: StartTime, clock: Clock) -> float:
    began = clock.now
    while not start.is_over:
        clock.passes(LOOK_SECONDS)
        start.look()
    return clock.now - began


def test_what_does_not_compute_has_the_time_that_was_set(clock: Clock) -> None:
    clock.share = 0.01
    start = StartTime("startup_timeout_seconds = 100", 100.0, lambda: clock.used)
    assert seconds_until_over(start, clock) == 100.0 + LOOK_SECONDS
    assert str(start) == "it was not ready within startup_timeout_seconds = 100; its CPU time was 1 s"


def test_what_computes_has_more_but_not_for_ever(clock: Clock, supervisor: NotifySocket) -> None:
    start = StartTime("its 100 s", 100.0, lambda: clock.used)
    said: list[dict[str, str]] = []
    began = clock.now
    while not start.is_over:
        clock.passes(LOOK_SECONDS)
        start.look()
        while (message := supervisor.receive()) is not None:
            said.append(message)
    taken = clock.now - began
    assert taken == LONGEST_STARTS * 100.0 + LOOK_SECONDS
    assert f"nor in the {taken:.0f} s that it had since it computed" in str(start)
    assert {"EXTEND_TIMEOUT_USEC": "60000000"} in said
    assert sum("STATUS" in message and "has until" in message["STATUS"] for message in said) == 1


def test_what_stops_computing_is_over_soon(clock: Clock) -> None:
    start = StartTime("its 100 s", 100.0, lambda: clock.used)
    for _ in range(20):
        clock.passes(LOOK_SECONDS)
        start.look()
    assert not start.is_over, "200 of 100 s have passed"
    clock.share = 0.0
    assert seconds_until_over(start, clock) <= start_time.EXTENSION_SECONDS + LOOK_SECONDS


def test_a_process_that_starts_asks_by_itself(monkeypatch: pytest.MonkeyPatch, supervisor: NotifySocket) -> None:
    monkeypatch.setattr(start_time, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(start_time, "LEAST_SHARE", 0.0)
    with asking_for_time(600.0):
        message = None
        while message is None:
            message = supervisor.receive()
    assert "EXTEND_TIMEOUT_USEC" in message
