"""SIGTERM and SIGINT as stop requests: counted, repetitions apart, and the former handlers restored."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from counterpoint.transport.process import stop_requests
from counterpoint.transport.process.stop_requests import STOP_SIGNALS, StopSignals, interrupted_in_order


def test_signals_are_requests_inside_the_block_only() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignals() as signals:
        assert (signals.count, signals.exit_code) == (0, 0)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # within a second: the same request
        assert (signals.count, signals.exit_code) == (1, 128 + signal.SIGINT)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_each_request_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_requests, "REPETITION_SECONDS", 0.0)
    reported: list[tuple[int, int]] = []
    with StopSignals(lambda request, number: reported.append((request, number))) as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert reported == [(1, signal.SIGTERM), (2, signal.SIGINT)]
    assert signals.exit_code == 128 + signal.SIGTERM


def test_a_second_request_ends_the_process_by_the_signal() -> None:
    program = """
import signal
from counterpoint.transport.process import stop_requests
stop_requests.REPETITION_SECONDS = 0.0
with stop_requests.StopSignals(stop_requests.end_at_second_request) as signals:
    signal.raise_signal(signal.SIGTERM)
    print(signals.count, flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("survived")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, b"1\n")


def test_a_second_request_ends_a_process_whose_signals_the_kernel_drops() -> None:
    program = """
import signal
from counterpoint.transport.process import stop_requests
stop_requests.REPETITION_SECONDS = 0.0
arrives, signal.raise_signal = signal.raise_signal, lambda number: None  # as in the first process of a container
with stop_requests.StopSignals(stop_requests.end_at_second_request):
    arrives(signal.SIGTERM)
    arrives(signal.SIGTERM)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 128 + signal.SIGTERM


def test_a_signal_that_is_ignored_ends_no_block() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupted_in_order():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_a_later_request_ends_what_the_first_one_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_requests, "REPETITION_SECONDS", 0.0)

    def begin() -> None:
        with interrupted_in_order():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        begin()
