"""A child of this process: what it inherits, how its output goes to a file, what it answers or reports, and how it is ended.

Most children run below a guardian (`transport/process/launch.py`:`guarded`), whose exit code is theirs; a guardian passes SIGTERM
on, and upon SIGHUP it kills all that is below it. A guardian that was killed itself would leave what its command had started.
A `Process` is one whose notifications are read, too (`transport/process/notify.py`).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular
from counterpoint.transport.process import launch
from counterpoint.transport.process.launch import SYSTEMD_VARIABLES, guarded
from counterpoint.transport.process.notify import NotifySocket

AGAIN_SECONDS = 0.1
"""Seconds after which a guardian is told to kill once more: where SIGHUP is ignored, as below `nohup`, one that was
just started may not have heard it."""

LONGEST_LINE = 1 << 20
"""Bytes of a line that a child writes for its parent."""

LOOK_SECONDS = 0.2
"""How often who waits for a child's line looks whether the wait is given up."""

INHERITED = 3
"""The number under which a worker finds a descriptor that it inherits."""

MOST_AT_ONCE = 1000
"""Notifications that are read before others have their turn: a worker may send them faster than they are read."""

LONGEST_PID = 9
"""Most digits of a process's id."""

_RESET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)


def own_environment() -> dict[str, str]:
    """Returns this process's environment without what concerns itself alone: for a child without a guardian."""
    return {name: value for name, value in os.environ.items() if name not in SYSTEMD_VARIABLES}


def spawn(
    command: Sequence[str],
    log_file: Path,
    environment: Mapping[str, str],
    *,
    standard_input: int | None = None,
    inherited: Mapping[int, int] | None = None,
    session: bool = False,
    mode: int = 0o644,
) -> int:
    """Starts `command` by `posix_spawn`; returns its pid.

    Its output is appended to `log_file`. It has a process group of its own, or with `session` a session, so that a Ctrl-C on
    the terminal reaches only this process. `inherited` has the numbers that it finds descriptors of this process under; without
    `standard_input` that is empty. Raises `OSError` when the log cannot be opened, or the system lacks memory, processes or
    descriptors; then nothing is left of the attempt.
    """
    group: dict[str, Any] = {"setsid": True} if session else {"setpgroup": 0}
    empty = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    return os.posix_spawn(
        command[0],
        list(command),
        environment,
        file_actions=[
            *((os.POSIX_SPAWN_DUP2, ours, theirs) for ours, theirs in (inherited or {}).items()),
            empty if standard_input is None else (os.POSIX_SPAWN_DUP2, standard_input, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log_file), os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsigmask=(),
        setsigdef=_RESET,
        **group,
    )


class NoLineError(Exception):
    """A child did not write the line that was due. The message says why; its subject is the child."""


def line_of(process: subprocess.Popen[bytes], seconds: float, is_given_up: Callable[[], bool] = lambda: False) -> bytes:
    """Waits for the line by which a child, whose output is a pipe, reports that it is ready, or answers; returns it with its end.

    Lines that were written together are returned together. Raises `NoLineError` after `seconds`, also if a part has come; soon
    after `is_given_up` returns true; if the child ends before; and if the line is longer than `LONGEST_LINE`. It does not end
    the child.
    """
    assert process.stdout is not None
    received, deadline = bytearray(), time.monotonic() + seconds
    poll = select.poll()  # `select.select` refuses descriptors above 1,023
    poll.register(process.stdout, select.POLLIN)
    while b"\n" not in received:
        left = deadline - time.monotonic()
        if left <= 0:
            raise NoLineError(f"wrote no line within {seconds:g} s")
        if is_given_up():
            raise NoLineError("is being stopped")
        if not poll.poll(1000 * min(left, LOOK_SECONDS)):
            continue
        data = os.read(process.stdout.fileno(), LONGEST_LINE)
        if not data:
            with suppress(subprocess.TimeoutExpired):
                raise NoLineError(f"ended with exit code {process.wait(max(0.0, deadline - time.monotonic()))}")
            raise NoLineError("closed its output")
        received += data
        if len(received) > LONGEST_LINE:
            raise NoLineError(f"wrote more than {LONGEST_LINE} bytes")
    return bytes(received)


def kill_guarded(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Kills a guarded child with everything below it, and waits for its end."""
    while process.poll() is None:
        for number in (signal.SIGHUP, signal.SIGCONT):  # a guardian may have been stopped with its command
            process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(AGAIN_SECONDS)


def end_guarded(process: subprocess.Popen[bytes] | subprocess.Popen[str], seconds: float) -> bool:
    """Asks a guarded child to end, and kills it and all below it after `seconds`; returns whether it ended by itself."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return True
    kill_guarded(process)
    return False


def size_of(file: Path) -> int:
    """Returns the size of a child's log in bytes; 0 if it cannot be read, since that must not disturb whoever watches it."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def last_lines(log_file: Path, count: int = 20, start: int = 0, end: int | None = None) -> list[str]:
    """Returns the last lines of a worker's output, between two positions in bytes; empty when it wrote none."""
    try:
        with open_regular(log_file) as file:
            end = min(size_of(log_file), end) if end is not None else size_of(log_file)
            first = max(start, end - 64 * 1024)
            file.seek(first)
            lines = file.read(max(0, end - first)).decode(errors="replace").splitlines()
    except (FileNotFoundError, UntrustedFileError):
        return []
    return [line.rstrip() for line in lines[-count:]]


@dataclass(frozen=True, slots=True)
class Command:
    """What a process runs."""

    name: str
    arguments: Sequence[str]
    """The program and its arguments."""
    log_file: Path
    """Its standard output and error are appended here."""
    silence_timeout_seconds: float | None = None
    """Longest time between two heartbeats, which it is told. None: it need not send any."""
    nice: int = 0
    """Added to the niceness: above 0 it yields the CPU to the others."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of this process."""


class Process:
    """A started worker. Start it from the main thread: the kernel ties its life to the thread that started it."""

    def __init__(self, command: Command, *, inherited: int | None = None, fence_seconds: float = 0.0) -> None:
        """Starts it; it finds the `inherited` descriptor as `INHERITED`.

        `fence_seconds`: as of `guarded`.

        Raises `OSError` when the log file cannot be opened, or the system lacks memory, processes or descriptors; then
        nothing is left of the attempt.
        """
        self.command = command
        self._inherited = inherited
        self._fence_seconds = fence_seconds
        self.main_pid: int | None = None
        """The command's own process, once the guardian has sent its pid."""
        self.status = ""
        """The last `STATUS=` it sent."""
        self._extension = 0.0
        self.trouble = ""
        """The problem that it last reported by `X_TROUBLE=`."""
        self.failure = ""
        """Why it is about to end, as it last said by `X_FAILURE=`."""
        self.log_from = size_of(command.log_file)
        """The place in the log where its output begins, in bytes: earlier processes may have written to it, too."""
        self.notifications = NotifySocket()
        try:
            self.guardian_pid = self._spawn()
        except OSError:
            self.notifications.close()
            raise

    def _spawn(self) -> int:
        command = self.command
        command.log_file.parent.mkdir(parents=True, exist_ok=True)
        environment = {**own_environment(), **command.environment}
        environment |= {"NOTIFY_SOCKET": self.notifications.address, "PYTHONUNBUFFERED": "1"}
        if command.silence_timeout_seconds is not None:
            environment["WATCHDOG_USEC"] = str(int(command.silence_timeout_seconds * 1e6))
        guardian = guarded(command.arguments, command.nice, self._fence_seconds, notifies=True)
        inherited = {} if self._inherited is None else {self._inherited: INHERITED}
        return spawn(guardian, command.log_file, environment, inherited=inherited)

    def terminate(self) -> None:
        """Sends the command SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Makes the guardian kill everything below itself."""
        self._signal(signal.SIGHUP)
        self._signal(signal.SIGCONT)  # a guardian may have been stopped with its worker

    def show_life(self) -> None:
        """Shows the guardian that this process lives."""
        self._signal(launch.SIGNAL_OF_LIFE)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it ended, and its exit is about to be noticed
            os.kill(self.guardian_pid, number)

    def read_notifications(self) -> set[str]:
        """Reads the worker's notifications, or many of them; returns which of `READY`, `WATCHDOG` and `STOPPING` it sent."""
        received: set[str] = set()
        for _ in range(MOST_AT_ONCE):
            if (message := self.notifications.receive()) is None:
                break
            received |= {word for word in ("READY", "WATCHDOG", "STOPPING") if message.get(word) == "1"}
            self.status = message.get("STATUS", self.status)
            if (microseconds := message.get("EXTEND_TIMEOUT_USEC", "")).isdecimal():
                self._extension = int(microseconds[:18]) / 1e6
            self.trouble = message.get("X_TROUBLE", self.trouble)
            self.failure = message.get("X_FAILURE", self.failure)
            if (pid := message.get("MAINPID", "")).isdecimal() and len(pid) <= LONGEST_PID:
                self.main_pid = int(pid)
        return received

    def take_extension(self) -> float:
        """Returns the seconds of extension that the worker requested since the last call; 0 if none."""
        taken, self._extension = self._extension, 0.0
        return taken

    def close(self) -> None:
        """Frees the notification address."""
        self.notifications.close()
