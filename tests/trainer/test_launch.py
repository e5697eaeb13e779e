"""The exit code of a trainer of several ranks, whatever order the ranks' ends come in."""

from __future__ import annotations

import signal
import subprocess
from contextlib import closing

import pytest

from counterpoint.trainer.launch import _supervise
from counterpoint.transport.process.notify import NotifySocket
from counterpoint.transport.process.ranks.node import RanksOrder
from counterpoint.transport.process.stop_requests import StopSignals
from tests.support.fake_ranks import FakeRanks


class EndingRanks(FakeRanks):
    """Ranks that live for so many looks, and of which one has then died."""

    def __init__(self, looks: int) -> None:
        super().__init__(RanksOrder("run", "host", 1, 1, 2, ("true",), directory="/nowhere"), None)
        self._looks = looks
        self.failure = "rank 1 was ended by SIGKILL"
        self.terminated = False

    @property
    def code(self) -> int | None:
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
    monkeypatch.setenv("NOTIFY_SOCKET", "")
    with closing(EndingRanks(looks=0 if stop is None else 1)) as ranks, StopSignals() as requests:
        ranks.says(f"MAINPID={ended_pid()}", *said)
        if stop is not None:
            signal.raise_signal(stop)
        assert _supervise(ranks, requests, lambda: None) == code
    assert not ranks.terminated, "a stop is for rank 0 alone"


def test_ranks_that_are_stopped_before_rank_zero_is_there_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "")
    with closing(EndingRanks(looks=1)) as ranks, StopSignals() as requests:
        ranks.says("STATUS=spares a wait")
        signal.raise_signal(signal.SIGINT)
        assert _supervise(ranks, requests, lambda: None) == 130
    assert ranks.terminated


def test_what_ranks_say_of_their_start_and_their_end_reaches_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "")
    with closing(EndingRanks(looks=0)) as ranks, closing(NotifySocket()) as supervisor, StopSignals() as requests:
        ranks.says("EXTEND_TIMEOUT_USEC=60000000", "X_FAILURE=no memory", "EXIT_STATUS=1")
        monkeypatch.setenv("NOTIFY_SOCKET", supervisor.address)
        assert _supervise(ranks, requests, lambda: None) == 1
        assert supervisor.receive() == {"EXTEND_TIMEOUT_USEC": "60000000"}
        assert supervisor.receive() == {"X_FAILURE": "no memory"}
