"""`transport.process.child`: what a child inherits, where its output goes, and that nothing of it is left once it is ended."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from counterpoint.transport.process.child import NoLineError, end_guarded, line_of, own_environment, size_of, spawn
from counterpoint.transport.process.launch import SYSTEMD_VARIABLES, exit_code_of, guarded
from tests.support.polling import DEADLINE_SECONDS

SHOW = "import os; print(*(name for name in sorted(os.environ) if name in ('NOTIFY_SOCKET', 'WATCHDOG_USEC', 'WATCHDOG_PID')))"


@pytest.mark.parametrize("notifies", [False, True])
def test_only_who_notifies_is_taken_for_the_supervised_process(tmp_path: Path, notifies: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.setblocking(False)
        environment = os.environ | {
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": "1",
            "WATCHDOG_PID": "2",
        }
        command = guarded([sys.executable, "-I", "-c", SHOW], notifies=notifies)
        shown = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        assert set(shown.split()) == (SYSTEMD_VARIABLES if notifies else set())
        if notifies:
            assert supervisor.recv(100).startswith(b"MAINPID=")
        else:
            with pytest.raises(BlockingIOError):
                supervisor.recv(100)


def test_a_child_without_a_guardian_inherits_nothing_of_that_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    monkeypatch.setenv("KEPT", "1")
    assert own_environment() == {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}


@pytest.mark.parametrize("session", [False, True])
def test_output_is_appended_and_descriptors_are_found(tmp_path: Path, session: bool) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    program = (
        "import os, sys; print(sys.stdin.read(), os.read(7, 9).decode(), os.getpgid(0) == os.getpid(), end=' ');"
        "print(os.getsid(0) == os.getpid()); sys.stdout.flush(); os.kill(os.getpid(), 10)"
    )
    given, kept = os.pipe()
    os.write(kept, b"told")
    try:
        pid = spawn(
            [sys.executable, "-I", "-c", program], log, os.environ, inherited={given: 7}, session=session, mode=0o600
        )
    finally:
        os.close(given)
        os.close(kept)
    assert exit_code_of(os.waitpid(pid, 0)[1]) == 128 + signal.SIGUSR1
    assert log.read_text() == f"before\n told True {session}\n"
    assert size_of(log) == log.stat().st_size
    assert size_of(tmp_path / "none") == 0


def test_who_does_not_end_in_time_is_killed_with_all_that_it_started() -> None:
    program = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
print(os.getpid(), flush=True)
time.sleep(600)
"""
    process = subprocess.Popen(guarded([sys.executable, "-I", "-c", program]), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    assert not end_guarded(process, 0.05)
    assert process.stdout.read() == ""  # nobody has the pipe any more
    process.stdout.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_who_ends_in_time_is_not_killed() -> None:
    program = "import time; print(1, flush=True); time.sleep(600)"
    process = subprocess.Popen(guarded([sys.executable, "-I", "-c", program]), stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert end_guarded(process, 60.0)
    assert process.returncode == 128 + signal.SIGTERM
    process.stdout.close()


@contextmanager
def child(program: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-I", "-u", "-c", program], stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_line_may_come_in_parts() -> None:
    with child("import time; print('a', end=''); time.sleep(0.05); print('b'); time.sleep(600)") as process:
        assert line_of(process, 60.0) == b"ab\n"


def test_a_line_is_read_in_a_process_that_has_many_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with child("print('a')") as process:
            pipe = process.stdout
            assert pipe is not None
            with os.fdopen(fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 1024), "rb") as process.stdout:
                assert line_of(process, 60.0) == b"a\n"
            process.stdout = pipe
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "seconds", "why"),
    [
        ("import time; time.sleep(600)", 0.1, r"no line within 0\.1 s"),
        ("import time; print('half', end=''); time.sleep(600)", 1.0, "no line within 1 s"),
        ("import sys; sys.exit(7)", 60.0, "exit code 7"),
        ("import sys; print('half', end=''); sys.exit(7)", 60.0, "exit code 7"),
        ("print('x' * 2**21)", 60.0, "more than 1048576 bytes"),
    ],
)
def test_a_child_that_writes_no_line_holds_up_nobody(program: str, seconds: float, why: str) -> None:
    with child(program) as process, pytest.raises(NoLineError, match=why):
        line_of(process, seconds)


@pytest.mark.slow
def test_a_child_that_closes_its_output_and_lives_on_holds_up_nobody() -> None:
    with child("import os, time; os.close(1); time.sleep(600)") as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], DEADLINE_SECONDS)[0]
        with pytest.raises(NoLineError, match="closed its output"):
            line_of(process, 1.0)


def test_a_wait_for_a_line_can_be_given_up() -> None:
    with child("import time; time.sleep(600)") as process, pytest.raises(NoLineError, match="is being stopped"):
        line_of(process, 600.0, lambda: True)
