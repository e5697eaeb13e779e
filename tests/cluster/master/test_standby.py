"""A standby and a master that is slow, or hangs."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.master import standby
from counterpoint.cluster.master.control import ControlError, NoMaster

LEASE_SECONDS = 25.0
"""A standby waits for two fifths of it."""


class Clock:
    """Seconds that the test counts."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def read(self) -> float:
        return self.seconds


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_master_whose_answers_are_late_lives_on_and_one_that_hangs_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """It answers each request after nine seconds, or refuses it, five times; then no more."""
    clock, killed, answered = Clock(), list[float](), asyncio.Event()
    may_answer, asked = threading.Semaphore(0), threading.Semaphore(0)
    loop = asyncio.get_running_loop()

    def ask(path: Path, request: Any, seconds: float) -> dict[str, Any]:
        asked.release()
        came = may_answer.acquire(timeout=60)
        loop.call_soon_threadsafe(answered.set)
        if not came:
            raise NoMaster("none answers") from TimeoutError()
        if refuses:
            raise ControlError("no such request")
        return {}

    monkeypatch.setattr(standby, "RunningClock", lambda: clock)
    monkeypatch.setattr(standby, "ask", ask)
    monkeypatch.setattr(standby.HungMaster, "_kill", lambda self: killed.append(clock.seconds))
    hung = standby.HungMaster(tmp_path, LEASE_SECONDS)
    for _ in range(5):
        clock.seconds += 1
        await hung.look()
        assert await asyncio.to_thread(asked.acquire, timeout=60)
        clock.seconds += 8.5
        await hung.look()
        may_answer.release()
        await asyncio.wait_for(answered.wait(), 60)
        answered.clear()
        while hung._question is not None:
            await hung.look()
            await asyncio.sleep(0)
    assert not killed
    clock.seconds += 1
    await hung.look()
    clock.seconds += 8.9
    await hung.look()
    assert not killed
    clock.seconds += 0.2
    await hung.look()
    assert killed == [clock.seconds]
    may_answer.release()


async def test_a_directory_without_a_master_has_none_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of one that has ended is free: the standby takes it."""
    clock = Clock()
    monkeypatch.setattr(standby, "RunningClock", lambda: clock)
    hung = standby.HungMaster(tmp_path, LEASE_SECONDS)
    for _ in range(4):
        clock.seconds += 9
        await hung.look()
        while hung._question is not None:
            await hung.look()
            await asyncio.sleep(0.001)
    assert hung._heard == clock.seconds
