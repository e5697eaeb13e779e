"""PID 1 of a container: it reaps orphans, passes signals on, and ends as its command does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.polling import DEADLINE_SECONDS, wait_until

pytestmark = pytest.mark.slow

FIRST = """
import os, signal, sys, time
from counterpoint.transport.process.first_process import stay_behind_as_first
from counterpoint.transport.process.launch import become_subreaper
become_subreaper()  # as PID 1 is
stay_behind_as_first()
"""


@contextmanager
def first(command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", FIRST + command], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def children(pid: int) -> list[str]:
    """The states of a process's children."""
    states = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
            states += [state] * (parent == str(pid))
    return states


def test_orphans_are_reaped_while_the_command_works() -> None:
    orphan = "\nif os.fork() == 0:\n  if os.fork() == 0:\n    time.sleep(0.02)\n  os._exit(0)\nos.wait()\n"
    with first(3 * orphan + "print('begun', flush=True)\ntime.sleep(60)") as process:
        assert said(process) == "begun"
        wait_until(lambda: children(process.pid) == ["S"], "every orphan to be reaped")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_the_command(number: signal.Signals) -> None:
    program = f"""
def told(number, frame):
    print(number, flush=True)
    sys.exit(7)
signal.signal({int(number)}, told)
print("ready", flush=True)
time.sleep(60)
"""
    with first(program) as process:
        assert said(process) == "ready"
        os.kill(process.pid, number)
        assert said(process) == str(int(number))
        assert process.wait(DEADLINE_SECONDS) == 7


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("", 0), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("os.abort()", 134)]
)
def test_it_ends_as_its_command_does(end: str, code: int) -> None:
    with first(end) as process:
        assert process.wait(DEADLINE_SECONDS) == code
