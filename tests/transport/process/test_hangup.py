"""SIGHUP: a closed terminal, or a wish to read the configuration again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from counterpoint.transport.process.hangup import Hangups, Terminals
from tests.support.polling import wait_until

PROGRAM = """
import os, signal, sys, time
from counterpoint.transport.process.hangup import ReloadOnHangup
from counterpoint.transport.process.stop_requests import StopSignals
told = int(sys.argv[1])
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with StopSignals(lambda request, number: os.write(told, b"stop")) as stop, ReloadOnHangup(lambda: os.write(told, b"reload")):
    os.write(told, b"ready ")
    while not stop.count:
        time.sleep(0.01)
sys.exit(stop.exit_code)
"""


@pytest.mark.parametrize(("terminal", "closed"), [(False, False), (True, False), (True, True)])
def test_a_hangup_stops_a_process_only_if_its_terminal_was_closed(terminal: bool, closed: bool) -> None:
    reader, told = os.pipe()
    mine, its = os.openpty()
    command = [sys.executable, "-c", PROGRAM, str(told)]
    output = its if terminal else subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[told], start_new_session=True
    )
    os.close(told)
    os.close(its)
    try:
        assert os.read(reader, 6) == b"ready "
        if closed:
            os.close(mine)
        process.send_signal(signal.SIGHUP)
        assert os.read(reader, 10) == (b"stop" if closed else b"reload")
        if not closed:
            assert process.poll() is None, "it goes on"
            process.terminate()
        wait_until(lambda: process.poll() is not None, "its end")
        assert process.returncode == (129 if closed else 143)
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        if not closed:
            os.close(mine)


def test_a_reload_that_takes_long_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.transport.process.hangup.CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(Terminals, "will_go", lambda self: False)
    begun, released = threading.Event(), threading.Event()

    def reload() -> None:
        begun.set()
        assert released.wait(60), "close waits for the reload"

    hangups = Hangups(lambda: None, reload)
    hangups.note()
    assert begun.wait(60)
    hangups.close()
    assert not released.is_set()
    released.set()
    wait_until(lambda: all(thread.name != "hangup" for thread in threading.enumerate()), "the end of the thread")


def test_a_signal_that_comes_during_a_reload_is_a_reload_after_it() -> None:
    """The one in progress may have read the file before it was changed again."""
    begun, go_on, ended = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)

    def reload() -> None:
        begun.release()
        assert go_on.wait(60)
        ended.release()

    hangups = Hangups(lambda: None, reload)
    hangups.note()
    assert begun.acquire(timeout=60)
    for _ in range(3):
        hangups.note()
    go_on.set()
    for _ in range(2):
        assert ended.acquire(timeout=60), "the file is read again"
    hangups.close()
    assert not ended.acquire(blocking=False), "signals that come together are one"
