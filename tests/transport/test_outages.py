"""One list of outages: each has the newest reason, the log gets each reason once, and whoever shows it is told of changes."""

from __future__ import annotations

import logging

import pytest

from counterpoint.transport import outages as module
from counterpoint.transport.outages import EXPECTED_SECONDS, OpenOutage, OutageKind, Outages

SERVER = "inference server http://a"


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def localtime(self, seconds: float) -> float:
        return seconds

    def strftime(self, _: str, moment: float) -> str:
        return f"<{moment:g}>"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def changes() -> list[None]:
    return []


@pytest.fixture
def outages(clock: Clock, changes: list[None], caplog: pytest.LogCaptureFixture) -> Outages:
    caplog.set_level(logging.INFO)
    return Outages(lambda: changes.append(None))


def test_an_outage_has_the_newest_reason_and_its_own_beginning(outages: Outages, clock: Clock) -> None:
    outages.begin(OutageKind.SERVER, SERVER, "takes no traffic", "connection refused", since=990.0)
    clock.now += 60
    outages.begin(OutageKind.SERVER, SERVER, "takes no traffic", "401 Unauthorized")
    assert outages.current() == [OpenOutage(OutageKind.SERVER, SERVER, "takes no traffic", 990.0, "401 Unauthorized")]
    assert outages.describe() == f"{SERVER} takes no traffic since <990>: 401 Unauthorized"
    outages.end(SERVER)
    assert outages.current() == []
    assert outages.describe() == ""


def test_the_log_has_every_reason_once(outages: Outages, caplog: pytest.LogCaptureFixture, changes: list[None]) -> None:
    for reason in ("connection refused", "no answer, 1 times", "no answer, 2 times", "401", "connection refused"):
        outages.begin(OutageKind.SERVER, SERVER, "takes no traffic", reason)
    outages.end(SERVER)
    outages.end(SERVER)
    logged = [record.getMessage() for record in caplog.records]
    assert [next(reason for reason in ("refused", "1 times", "401") if reason in line) for line in logged[:3]] == [
        "refused",
        "1 times",
        "401",
    ]
    assert len(logged) == 4
    assert "over" in logged[3]
    assert len(changes) == 6, "each of the five reasons, and the end"


def test_an_outage_that_lasts_is_logged_again_and_again_but_seldom(
    outages: Outages, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    outages.begin(OutageKind.TRAINER, "the trainer at x", "is not connected", "it left", level=logging.WARNING)
    caplog.clear()
    for _ in range(600):
        clock.now += 1
        outages.remind()
    assert 10 <= len(caplog.records) <= 15
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert "the trainer at x" in caplog.records[-1].getMessage()
    outages.end("the trainer at x")
    caplog.clear()
    clock.now += 600
    outages.remind()
    assert not caplog.records


def test_what_is_expected_is_waited_for_and_its_reason_is_told_once_it_has_lasted(
    outages: Outages, clock: Clock, changes: list[None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    outages.begin(OutageKind.SERVER, SERVER, "is not ready yet", "nothing listens there", level=logging.INFO)
    assert outages.are_expected
    assert outages.describe() == f"waiting for {SERVER} since <1000>"
    told = len(changes)
    clock.now += EXPECTED_SECONDS + 1
    outages.remind()
    assert outages.describe().endswith(": nothing listens there")
    assert len(changes) == told + 1, "whoever shows it shows the reason, too"
    assert caplog.records[-1].getMessage().startswith(f"still out: waiting for {SERVER}")
    outages.begin(OutageKind.TRAINER, "the trainer at x", "is not connected", "it left", level=logging.WARNING)
    assert not outages.are_expected


def test_a_flood_of_outages_and_reasons_stays_bounded(outages: Outages, caplog: pytest.LogCaptureFixture) -> None:
    for letter in "abcdefghijklmnopqrstuvwxyz":
        outages.begin(OutageKind.SERVER, SERVER, "takes no traffic", f"{letter} " * 1000)
    assert len(caplog.records) <= 16
    [outage] = outages.current()
    assert len(outage.reason) <= module.MAX_REASON
    for number in range(100):
        outages.begin(OutageKind.SERVER, f"server {number}", "takes no traffic", "no answer")
    assert len(outages.describe()) < 8000


def test_a_peer_that_still_starts_is_in_the_log_once_it_takes_long(
    outages: Outages, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    outages.begin(OutageKind.SERVER, SERVER, "takes no traffic", "refused", level=logging.INFO)
    outages.begin(OutageKind.SERVER, SERVER, "takes no traffic", "is loading")
    outages.remind()
    assert not caplog.records
    clock.now += module.EXPECTED_SECONDS + 1
    outages.remind()
    assert [(SERVER in record.getMessage(), record.levelno) for record in caplog.records] == [(True, logging.INFO)]
    outages.end(SERVER)
    assert len(caplog.records) == 1
