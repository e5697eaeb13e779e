"""One worker as an operating-system process, under its guardian (`transport.process.launch`): starts, signals and reads it.

Children are started with `posix_spawn`, in a process group of their own, so that a Ctrl-C on the terminal reaches only the
supervisor, which then stops them in order. The guardian ends them when the supervisor dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from counterpoint.cluster.notify import NotifySocket
from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular
from counterpoint.transport.process import launch
from counterpoint.transport.process.child import own_environment, size_of, spawn
from counterpoint.transport.process.launch import guarded

INHERITED = 3
"""The number under which a worker finds a descriptor that it inherits."""

MOST_AT_ONCE = 1000
"""Notifications that are read before others have their turn: a worker may send them faster than they are read."""

LONGEST_PID = 9
"""Most digits of a process's id."""


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
        with contextlib.suppress(ProcessLookupError):  # it ended, and its exit is about to be noticed
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
