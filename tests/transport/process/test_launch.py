"""Whom the guardian's code kills, in a world of processes that is made up: what moves between two looks at it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterpoint.transport.files.own_directory import remove_left
from counterpoint.transport.process import launch
from tests.support.polling import DEADLINE_SECONDS, wait_until

GUARDIAN, WORKER, ORPHAN, ITS_CHILD, NEWCOMER = 101, 102, 103, 104, 105


def test_orphans_are_killed_and_what_a_guarded_worker_starts_meanwhile_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = {os.getpid(): [GUARDIAN, ORPHAN], GUARDIAN: [WORKER], ORPHAN: [ITS_CHILD]}

    def looks() -> Iterator[dict[int, list[int]]]:
        yield world
        while True:
            yield world | {WORKER: [NEWCOMER]}

    at_each_look = looks()
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(launch, "_children", lambda: next(at_each_look))
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    launch.kill_orphans([GUARDIAN])
    assert sorted(killed) == [(ORPHAN, signal.SIGKILL), (ITS_CHILD, signal.SIGKILL)]


def test_what_belongs_to_another_user_is_left_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = {os.getpid(): [ORPHAN, WORKER], ORPHAN: [ITS_CHILD]}
    killed: list[int] = []

    def kill(pid: int, number: int) -> None:
        if pid == ORPHAN:
            raise PermissionError(1, "Operation not permitted")
        killed.append(pid)
        for children in world.values():
            if pid in children:
                children.remove(pid)

    monkeypatch.setattr(launch, "_children", lambda: world)
    monkeypatch.setattr(launch, "reap", lambda: [])  # else it collects whatever child of the tests has ended
    monkeypatch.setattr(os, "kill", kill)
    launch.kill_orphans([])
    assert sorted(killed) == [WORKER, ITS_CHILD]
    world[ORPHAN] = [ITS_CHILD]
    assert launch.kill_descendants(timeout_seconds=600.0) == [ORPHAN], "and not waited for"


def test_what_dies_between_the_reaping_and_the_look_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    living, dying, zombies = {ORPHAN}, set[int](), set[int]()

    def look() -> dict[int, list[int]]:
        zombies.update(dying)
        living.difference_update(dying)
        return {os.getpid(): [*living]}

    monkeypatch.setattr(launch, "_children", look)

    def reap() -> list[tuple[int, int]]:
        zombies.clear()
        return []

    monkeypatch.setattr(launch, "reap", reap)
    monkeypatch.setattr(os, "kill", lambda pid, number: dying.add(pid))
    assert launch.kill_descendants() == []
    assert not living
    assert not zombies


WITHOUT_ITS_FIRST_THREAD = """
import ctypes, sys, threading
threading.Thread(target=threading.Event().wait).start()
print("begun", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.slow
def test_a_process_whose_first_thread_alone_has_ended_lives() -> None:
    """The kernel shows it as a zombie. So it does while the threads of a killed process end, one after the other."""
    with subprocess.Popen([sys.executable, "-c", WITHOUT_ITS_FIRST_THREAD], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            stat = Path(f"/proc/{process.pid}/stat")
            wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "the end of its first thread")
            assert process.pid in launch.descendants(os.getpid())
        finally:
            process.kill()
        process.wait(DEADLINE_SECONDS)
        assert process.pid not in launch.descendants(os.getpid())


@pytest.mark.slow
def test_the_exit_code_of_a_worker_whose_descendant_cannot_be_killed_is_kept(tmp_path: Path) -> None:
    """Who may kill whom is injected: only root could start a process of another user."""
    guardian = """
    import os, sys
    from counterpoint.transport.process import launch
    kill = os.kill
    def refuse(pid, number):
        if os.path.exists(sys.argv[1]) and pid == int(open(sys.argv[1]).read()):
            raise PermissionError(1, "Operation not permitted")
        kill(pid, number)
    os.kill = refuse
    sys.exit(launch.guard(sys.argv[2:], nice=0, parent=os.getppid()))
    """
    worker = """
    import os, subprocess, sys
    child = subprocess.Popen(["sleep", "600"], start_new_session=True, stderr=subprocess.DEVNULL)
    open(sys.argv[1], "w").write(str(child.pid))
    os._exit(7)
    """
    pid_file = str(tmp_path / "pid")
    command = [sys.executable, "-c", textwrap.dedent(guardian), pid_file]
    command += [sys.executable, "-c", textwrap.dedent(worker), pid_file]
    completed = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_SECONDS, check=False
    )
    left = Path(pid_file).read_text()
    os.kill(int(left), signal.SIGKILL)
    assert completed.returncode == 7
    assert completed.stderr == f"cannot kill what the worker left behind: process {left}\n"


@pytest.mark.slow
def test_a_full_log_does_not_change_the_exit_code() -> None:
    guardian = """
    import os, sys
    from counterpoint.transport.process import launch
    launch.kill_descendants = lambda: [1]  # injected: a process that may not be killed
    sys.exit(launch.guard(["sh", "-c", "exit 7"], nice=0, parent=os.getppid()))
    """
    with open("/dev/full", "w") as full:
        completed = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(guardian)],
            stdout=full,
            stderr=full,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
    assert completed.returncode == 7


def test_exit_codes_are_known_where_the_caller_ignores_the_death_of_children() -> None:
    """As a shell after `trap '' CHLD` does: what it starts inherits that, and then the kernel reaps by itself."""
    program = textwrap.dedent("""
        import os, signal
        from counterpoint.transport.process import launch

        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        launch.become_subreaper()
        if (child := os.fork()) == 0:
            os._exit(3)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert launch.reap() == [(child, 3)]
    """)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE_SECONDS)


LITTER = """
import os, socket, sys, tempfile
open(tempfile.gettempdir() + "/file", "w").close()
os.mkdir(tempfile.gettempdir() + "/folder")
socket.socket(socket.AF_UNIX).bind(tempfile.gettempdir() + "/" + "0" * 36)
print(tempfile.gettempdir(), os.environ["X_SHARED_TMPDIR"], os.environ["RAY_TMPDIR"], flush=True)
if sys.argv[1:]:
    os.execv(sys.executable, sys.argv[1:])
"""


@pytest.mark.slow
def test_what_a_command_leaves_in_its_temporary_directory_goes_with_it() -> None:
    """That of a command below another guardian, too, in which sockets still find room."""
    short = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))
    environment = os.environ | {"TMPDIR": str(short)}
    for name in (launch.SHARED_TMPDIR, "RAY_TMPDIR"):
        environment.pop(name, None)
    program = [sys.executable, "-c", textwrap.dedent(LITTER)]
    guardian = [sys.executable, "-I", "-S", launch.__file__]
    nested = """
    import os, subprocess, sys
    subprocess.run([sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), "0", "0", *sys.argv[2:]], check=True)
    """
    words = [
        *guardian,
        str(os.getpid()),
        "0",
        "0",
        *program,
        sys.executable,
        "-c",
        textwrap.dedent(nested),
        launch.__file__,
        *program,
    ]
    try:
        done = subprocess.run(
            words, env=environment, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_SECONDS, check=True
        )
        (outer, *shared), (below, *shared_below) = (line.split() for line in done.stdout.splitlines())
        assert Path(outer).parent == short
        assert Path(below).parent == Path(outer)
        assert shared == shared_below == [str(short)] * 2
        assert list(short.iterdir()) == []
    finally:
        short.rmdir()


@pytest.mark.slow
def test_what_a_killed_guardian_leaves_is_removed_by_the_next_and_what_a_live_one_has_stays() -> None:
    short = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))
    words = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), "0", "0"]
    program = "import tempfile, time; print(tempfile.gettempdir(), flush=True); time.sleep(600)"
    environment = {name: value for name, value in os.environ.items() if name != launch.SHARED_TMPDIR}
    guardian = subprocess.Popen(
        [*words, sys.executable, "-c", program], env=environment | {"TMPDIR": str(short)}, stdout=subprocess.PIPE
    )
    try:
        assert guardian.stdout is not None
        own = Path(guardian.stdout.readline().decode().strip())
        remove_left(short, launch.TEMPORARY)
        assert own.parent == short
        assert own.is_dir()
    finally:
        guardian.kill()
        guardian.communicate()  # its command, too, has ended: it had the pipe
    assert own.is_dir()
    remove_left(short, launch.TEMPORARY)
    short.rmdir()
