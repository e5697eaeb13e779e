"""The watchdog names what is awaited when nothing moves, and the code that blocks a loop."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from counterpoint.run.loop_health.watchdog import StallError, Watchdog, awaiting, describe_waits, waits
from counterpoint.transport.outages import OutageKind, Outages
from counterpoint.transport.process.notify import NotifySocket
from tests.support.polling import until, wait_until


async def beat(watchdog: Watchdog) -> None:
    while True:
        watchdog.beat()
        await asyncio.sleep(0.005)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The watchdog's time, which passes here only: a machine that pauses is then not taken for a loop that is blocked, for which
    the watchdog would end this very process."""
    clock = Clock()
    monkeypatch.setattr("counterpoint.run.loop_health.watchdog.time", clock)
    return clock


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def pass_while(self, task: asyncio.Task[None], watchdog: Watchdog, seconds: float, progress: bool) -> None:
        """Lets `seconds` pass, a tenth at a time, on a loop that ticks; fewer when the task ends."""
        end = self.now + seconds
        while self.now < end and not task.done():
            self.now += 0.1
            watchdog.beat()
            if progress:
                watchdog.progress()
            await asyncio.sleep(0.02)


def test_waits_are_named_while_they_last(clock: Clock) -> None:
    with awaiting("the trainer's READY", "ipc:///a"), awaiting("a completion"):
        clock.now += 7
        assert [wait.what for wait in waits()] == ["the trainer's READY", "a completion"]
        assert "the trainer's READY (ipc:///a) for 7.0 s" in describe_waits()
    assert waits() == []
    assert describe_waits().startswith("nothing of its own")


@pytest.mark.slow
async def test_a_stall_is_described_and_ends_the_run(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    watchdog = Watchdog(0.2, 1.0, lambda: "waiting for policy version 3")
    with awaiting("the broadcast", "/somewhere"):
        task = asyncio.create_task(watchdog.run())
        await clock.pass_while(task, watchdog, 1000.0, progress=False)
        with pytest.raises(StallError, match="the broadcast"):
            await task
    assert "Awaited: the broadcast (/somewhere)" in caplog.text
    assert "waiting for policy version 3" in caplog.text


@pytest.mark.slow
async def test_progress_keeps_it_quiet(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    watchdog = Watchdog(0.2, 1.0, lambda: "")
    task = asyncio.create_task(watchdog.run())
    await clock.pass_while(task, watchdog, 5.0, progress=True)
    assert not task.done()
    assert "no progress" not in caplog.text
    task.cancel()


def test_a_run_whose_rollouts_all_fail_says_so_and_not_what_the_next_one_awaits() -> None:
    watchdog = Watchdog(60, None, lambda: "")
    watchdog.failing = "RuntimeError (in sums)"
    with awaiting("a completion for rollout 7-1"):
        assert watchdog._trouble(0.0, 50.0).endswith("; its rollouts fail: RuntimeError (in sums)")
        watchdog.progress()
        assert watchdog._trouble(0.0, 50.0).endswith("; it waits for a completion for rollout 7-1")


def test_a_run_whose_steps_take_long_is_in_no_trouble_until_one_takes_twice_as_long(clock: Clock) -> None:
    outages = Outages()
    watchdog = Watchdog(120, None, lambda: "", outages)
    assert watchdog._trouble(0.0, 40.0), "nothing is known of its steps yet"
    for _ in range(3):
        clock.now += 40
        watchdog.progress()
        clock.now += 0.1
        watchdog.progress()
    assert not watchdog._trouble(0.0, 41.0)
    assert watchdog._trouble(0.0, 81.0)
    outages.begin(OutageKind.TRAINER, "the trainer at x", "is not connected", "its heartbeat stopped")
    assert watchdog._trouble(0.0, 41.0), "what is known to be out is told at once"
    outages.end("the trainer at x")
    clock.now += 700
    watchdog.progress()
    assert watchdog._trouble(0.0, 121.0), "however long it took before, the log warns by then"
    clock.now += 601
    for _ in range(2):
        watchdog.progress()
        clock.now += 601
    for _ in range(70):
        clock.now += 10
        watchdog.progress()
    assert watchdog._trouble(0.0, 41.0), "steps take less by now"


def test_an_outage_is_told_before_what_waits_for_its_end() -> None:
    outages = Outages()
    watchdog = Watchdog(60, None, lambda: "", outages)
    watchdog.failing = "RuntimeError (in sums)"
    outages.begin(OutageKind.TRAINER, "the trainer at x", "is not connected", "its heartbeat stopped")
    with awaiting("a completion for rollout 7-1"):
        assert watchdog._trouble(0.0, 50.0).endswith(": its heartbeat stopped")
        outages.end("the trainer at x")
        assert "RuntimeError" in watchdog._trouble(0.0, 50.0)


def test_a_start_that_is_waited_for_is_no_trouble() -> None:
    outages = Outages()
    watchdog = Watchdog(60, None, lambda: "", outages)
    outages.begin(OutageKind.SERVER, "inference server x", "is not ready yet", "nothing listens", level=logging.INFO)
    assert watchdog._trouble(0.0, 50.0) == ""


def hold_the_loop(until_logged: pytest.LogCaptureFixture) -> None:
    wait_until(lambda: "hold_the_loop" in until_logged.text, "the watchdog's log")


@pytest.mark.slow
async def test_a_blocked_loop_is_named_by_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = Watchdog(0.05, None, lambda: "")
    task = asyncio.create_task(watchdog.run())
    await asyncio.sleep(0)
    with caplog.at_level(logging.ERROR):
        hold_the_loop(caplog)
    assert "blocked for" in caplog.text
    assert "in hold_the_loop" in caplog.text
    task.cancel()


@pytest.mark.slow
async def test_a_blocked_loop_is_told_to_the_supervisor_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    socket = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", socket.address)
    watchdog = Watchdog(0.2, None, lambda: "")
    task = asyncio.create_task(watchdog.run())
    await asyncio.sleep(0)
    troubles: list[str] = []

    def told() -> bool:
        while (message := socket.receive()) is not None:
            troubles.append(message.get("X_TROUBLE", ""))
        return any("blocked since" in trouble for trouble in troubles)

    wait_until(told, "the trouble")
    task.cancel()
    socket.close()
    (trouble,) = {trouble for trouble in troubles if "blocked since" in trouble}
    assert re.search(r" at .+ \(.+\.py:\d+\)$", trouble)


@pytest.mark.slow
async def test_systemd_is_fed_only_while_the_loop_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    socket = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", socket.address)
    monkeypatch.setenv("WATCHDOG_USEC", "150000")
    watchdog = Watchdog(60, None, lambda: "")
    task = asyncio.create_task(watchdog.run())
    beating = asyncio.create_task(beat(watchdog))
    received: list[dict[str, str]] = []

    def fed() -> bool:
        while (message := socket.receive()) is not None:
            received.append(message)
        return len(received) >= 3

    await until(fed, "three messages to systemd")
    assert received[0] == {"WATCHDOG": "1"}
    beating.cancel()
    await asyncio.sleep(0.2)
    fed()
    received.clear()
    await asyncio.sleep(0.3)
    assert not fed()
    assert received == []
    task.cancel()
    socket.close()
