"""The exit code of a trainer of several ranks, whatever order the ranks' ends come in."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import pytest

from counterpoint.trainer.launch import _supervise
from counterpoint.transport.process.notify import NotifySocket, notify
from counterpoint.transport.process.stop_requests import StopSignals


class EndingRanks:
    """Ranks that live for so many looks, and of which one has then died."""

    failure = "rank 1 was ended by SIGKILL"

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self.terminated = False

    def poll(self) -> int | None:
        self._looks -= 1
        return None if self._looks >= 0 else 1

    def terminate(self) -> None:
        self.terminated = True


def ended_pid() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("said", "stop", "code"),
    [
        (["READY=1"], None, 1),
        (["READY=1", "EXIT_STATUS=0"], None, 0),
        (["READY=1", "EXIT_STATUS=3"], None, 3),
        (["EXIT_STATUS=2"], None, 2),  # of a follower: torch's agent has ended rank 0 before it said so
        (["READY=1", "EXIT_STATUS=143"], None, 1),  # rank 0 took the end of the others for a request
        (["READY=1", "EXIT_STATUS=143"], signal.SIGTERM, 143),
        (["READY=1", "EXIT_STATUS=143"], signal.SIGINT, 130),  # rank 0 gets a SIGTERM in any case
        ([], signal.SIGTERM, 143),  # nothing was trained yet, however the ranks have ended
        (["READY=1"], signal.SIGTERM, 1),
    ],
)
def test_the_exit_code_is_rank_zeros_unless_another_one_died(
    monkeypatch: pytest.MonkeyPatch, said: list[str], stop: signal.Signals | None, code: int
) -> None:
    socket = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", socket.address)
    ranks: Any = EndingRanks(looks=0 if stop is None else 1)
    for state in [f"MAINPID={ended_pid()}", *said]:
        assert notify(state)
    try:
        with StopSignals() as requests:
            if stop is not None:
                signal.raise_signal(stop)
            assert _supervise(ranks, socket, requests, lambda: None) == code
    finally:
        socket.close()
    assert not ranks.terminated, "a stop is for rank 0 alone"


def test_ranks_that_are_stopped_before_rank_zero_is_there_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    socket = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", socket.address)
    assert notify("STATUS=spares a wait")
    ranks: Any = EndingRanks(looks=1)
    try:
        with StopSignals() as requests:
            signal.raise_signal(signal.SIGINT)
            assert _supervise(ranks, socket, requests, lambda: None) == 130
    finally:
        socket.close()
    assert ranks.terminated


def test_what_ranks_say_of_their_start_and_their_end_reaches_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    socket, supervisor = NotifySocket(), NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", socket.address)
    for state in ("EXTEND_TIMEOUT_USEC=60000000", "X_FAILURE=no memory", "EXIT_STATUS=1"):
        assert notify(state)
    monkeypatch.setenv("NOTIFY_SOCKET", supervisor.address)
    ranks: Any = EndingRanks(looks=0)
    try:
        with StopSignals() as requests:
            assert _supervise(ranks, socket, requests, lambda: None) == 1
        assert supervisor.receive() == {"EXTEND_TIMEOUT_USEC": "60000000"}
        assert supervisor.receive() == {"X_FAILURE": "no memory"}
    finally:
        socket.close()
        supervisor.close()
