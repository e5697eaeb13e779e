"""`transport.process.child`: what a child inherits, where its output goes, and that nothing of it is left once it is ended."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

import counterpoint.transport.process.child as child_module
from counterpoint.transport.process.child import (
    KEPT_ERRORS,
    Child,
    ChildError,
    own_environment,
    run,
    size_of,
    spawn,
)
from counterpoint.transport.process.launch import COMMAND_NOT_STARTED, SYSTEMD_VARIABLES, exit_code_of, guarded
from tests.support.polling import DEADLINE_SECONDS, wait_until

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


STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
os.write(1, b"%d\\n" % os.getpid())
time.sleep(600)
"""
WILLING = "import time; print(1, flush=True); time.sleep(600)"


def python(program: str) -> list[str]:
    return [sys.executable, "-I", "-u", "-c", program]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("on_loop", [False, True])
@pytest.mark.parametrize(("program", "seconds", "signal_number"), [(STUBBORN, 0.05, 9), (WILLING, 60.0, 15)])
async def test_who_does_not_end_in_time_is_killed_with_all_that_it_started(
    program: str, seconds: float, signal_number: int, on_loop: bool
) -> None:
    with Child("the child", python(program), stdout=PIPE) as started:
        pids = [int(started.stdout.readline()) for _ in range(1 + (program == STUBBORN))]
        if on_loop:
            waiting = [asyncio.create_task(started.ended()) for _ in range(2)]
            assert await started.stopped(seconds) == 128 + signal_number
            assert await asyncio.gather(*waiting) == [128 + signal_number] * 2
        else:
            assert started.stop(seconds) == (program == WILLING)
        assert started.code == started.wait() == 128 + signal_number
        assert started.stdout.read() == b""  # nobody has the pipe any more
        assert program == WILLING or all(map(is_gone, pids))
        started.signal(signal.SIGTERM)  # there is nobody any more whom it could reach
        started.kill()


def test_the_group_of_a_child_without_a_guardian_is_killed_with_it() -> None:
    program = "import os, time; os.fork(); os.write(1, b'1\\n'); time.sleep(600)"  # at once: both write
    with Child("the child", python(program), stdout=PIPE, guarded=False) as started:
        assert [started.stdout.readline() for _ in range(2)] == [b"1\n"] * 2
        started.kill()
        assert started.stdout.read() == b""  # nobody has the pipe any more


def test_a_child_that_is_stopped_by_a_signal_is_killed_and_named_where_it_does_not_end() -> None:
    with Child("the child", python(WILLING), stdout=PIPE) as started:
        assert started.ready(60.0) == b"1\n"
        started.signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError, match="the child did not end within 0"):
            started.wait(0.0)
    assert started.code == 128 + signal.SIGKILL


@pytest.mark.parametrize("is_guarded", [True, False])
def test_nothing_of_a_guarded_child_is_left_when_its_parent_is_killed_and_a_free_one_lives_on(is_guarded: bool) -> None:
    parent = f"""
import time
from subprocess import PIPE
from counterpoint.transport.process.child import Child
child = Child("the child", {python(STUBBORN)!r}, guarded={is_guarded})
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-P", "-c", parent], stdout=PIPE) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.kill()
        process.wait()
        if is_guarded:
            assert process.stdout.read() == b""  # it comes once nobody has the pipe
            assert all(map(is_gone, pids))
        else:
            assert [os.getsid(pid) for pid in pids] == pids
            for pid in pids:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("is_guarded", "nice"), [(True, 3), (False, 0)])
def test_a_child_has_what_it_is_given_and_none_of_our_descriptors_nor_our_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_guarded: bool, nice: int
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    program = (
        "import os, sys; print(sys.stdin.read(), os.getcwd(), os.environ['KEPT'], os.environ.get('NOTIFY_SOCKET'));"
        "found = [each for each in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{each}')];"
        "print(sorted(map(int, found))[3:], os.nice(0), file=sys.stderr)"
    )
    log = tmp_path / "log"
    log.write_text("before\n")
    passed, kept = os.pipe()
    os.set_inheritable(kept, True)  # as a library may
    environment = os.environ | {"KEPT": "1"}
    try:
        with Child(
            "the child", python(program), given=b"told", environment=environment, directory=tmp_path, log=log,
            pass_fds=[passed], nice=nice, guarded=is_guarded,
        ) as started:  # fmt: skip
            assert started.wait(60.0) == 0
        assert started.last_lines(9) == [f"told {tmp_path} 1 None", f"[{passed}] {os.nice(0) + nice}"]
        assert log.read_text().startswith("before\n")
    finally:
        os.close(passed)
        os.close(kept)


def test_what_a_child_writes_after_it_is_ready_never_blocks_it() -> None:
    with Child(
        "the child", python("print('ready'); print('x' * 2**22); import sys; sys.exit(7)"), stdout=PIPE
    ) as started:
        assert started.ready(60.0).startswith(b"ready\n")
        assert started.wait(60.0) == 7


def test_a_child_that_is_not_ready_is_named() -> None:
    program = python("import sys; sys.exit(7)")
    with (
        Child("the child", program, stdout=PIPE) as started,
        pytest.raises(ChildError, match="the child ended with exit code 7"),
    ):
        started.ready(60.0)


def test_a_child_that_notifies_is_heard() -> None:
    program = "from counterpoint.transport.process.notify import notify_ready; notify_ready(); input()"
    with Child("the child", [sys.executable, "-P", "-c", program], stdin=PIPE, notifies=True) as started:
        wait_until(lambda: started.is_ready, "READY=1")
        started.stdin.close()
        assert started.wait(60.0) == 1
        assert started.is_ready


def test_a_command_is_run_to_its_end_whatever_it_writes() -> None:
    program = "import sys; sys.stderr.write('e' * 2**18 + 'end'); sys.stdout.write(sys.stdin.read() * 2); sys.exit(7)"
    outcome = run("the command", python(program), 60.0, given=b"x" * 2**20)
    assert outcome.code == 7
    assert outcome.output == b"x" * 2**21
    assert (len(outcome.errors), outcome.errors[-4:]) == (KEPT_ERRORS, "eend")
    killed = run("the command", python("import os; os.kill(os.getpid(), 9)"), 60.0, stderr=None, guarded=False)
    assert killed == (128 + signal.SIGKILL, b"", "")


@pytest.mark.parametrize(
    ("program", "is_guarded"),
    [
        (WILLING, False),
        (WILLING, True),
        ("import os, time; os.close(1); os.close(2); time.sleep(600)", False),
        (STUBBORN, True),
    ],
)
def test_a_command_that_does_not_end_in_time_is_killed(program: str, is_guarded: bool) -> None:
    with pytest.raises(TimeoutError, match=r"the command did not end within 0\.1 s"):
        run("the command", python(program), 0.1, guarded=is_guarded)


def test_a_command_that_writes_without_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "MOST_OUTPUT", 2**20)
    with pytest.raises(ChildError, match="the command wrote more than 1048576 bytes"):
        run("the command", ["cat", "/dev/zero"], 60.0)


def test_a_program_that_is_not_there() -> None:
    assert run("the command", ["/nowhere"], 60.0).code == COMMAND_NOT_STARTED
    with pytest.raises(FileNotFoundError):
        run("the command", ["/nowhere"], 60.0, guarded=False)


def child(program: str) -> Child:
    return Child("the child", python(program), stdout=PIPE, guarded=False)


def test_a_line_may_come_in_parts() -> None:
    with child("import time; print('a', end=''); time.sleep(0.05); print('b'); time.sleep(600)") as process:
        assert process.line(60.0) == b"ab\n"


def test_a_line_is_read_in_a_process_that_has_many_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with child("print('a')") as process:
            pipe = process.stdout
            with os.fdopen(fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 1024), "rb") as process._process.stdout:
                assert process.line(60.0) == b"a\n"
            process._process.stdout = pipe
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
    with child(program) as process, pytest.raises(ChildError, match=why):
        process.line(seconds)


@pytest.mark.slow
def test_a_child_that_closes_its_output_and_lives_on_holds_up_nobody() -> None:
    with child("import os, time; os.close(1); time.sleep(600)") as process:
        assert select.select([process.stdout], [], [], DEADLINE_SECONDS)[0]
        with pytest.raises(ChildError, match="closed its output"):
            process.line(1.0)


def test_a_wait_for_a_line_can_be_given_up() -> None:
    with child("import time; time.sleep(600)") as process, pytest.raises(ChildError, match="is being stopped"):
        process.line(600.0, lambda: True)
