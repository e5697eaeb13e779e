"""A fork server that is forked from the tuner itself, for trainables that only the tuner's process has: lambdas and closures.

    executor -- guardian -- fork server -- minder -- trial

The guardian is a fork, too. It kills everything below it when the tuner dies. Trials do not see what the tuner does after the
fork. A process with threads must not be forked, so the tuner forks before its own threads begin, or refuses.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import NoReturn

from counterpoint.transport.process.launch import die_with_parent, kill_descendants
from counterpoint.tune.errors import TuneError
from counterpoint.tune.executors.fork_server import CUDA, mind, serve, unfit_to_fork
from counterpoint.tune.registry import closures

_WAITS = (
    ("threading.py", "wait"),
    ("threading.py", "_wait_for_tstate_lock"),
    ("queue.py", "get"),
    ("selectors.py", "select"),
    ("thread.py", "_worker"),
    ("search_thread.py", "_serve"),
    ("garbage.py", "run"),  # pyzmq's, in each process that has sent without a copy; a fork makes one of its own
)
"""File and function of each place where a thread only waits: there it holds no lock that a fork would miss."""


def reason_against_a_fork() -> str:
    """Why this process must not be forked; empty if it may be. Threads that only wait are no reason."""
    frames = sys._current_frames()
    busy = []
    for thread in threading.enumerate():
        frame = None if thread.ident is None else frames.get(thread.ident)
        if thread is not threading.current_thread() and frame is not None:
            code = frame.f_code
            if (os.path.basename(code.co_filename), code.co_name) not in _WAITS:
                busy.append(thread.name)
    if busy:
        return f"a thread at work: {', '.join(busy)}"
    if threading.current_thread() is not threading.main_thread():
        return "its experiment in a thread that is not the main one"
    return CUDA if unfit_to_fork() == CUDA else ""


class ForkedHere:
    """The guardian of such a fork server, as `subprocess.Popen` is of one that is started; and what the server has."""

    def __init__(self) -> None:
        """Forks. Raises `TuneError` if this process must not be forked."""
        if unfit := reason_against_a_fork():
            raise TuneError(
                f"this process has {unfit}, so that no lambda or closure of it can be run by a fork; begin the experiment before "
                "that, or move the function to the top of its module"
            )
        self.known = closures()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.returncode: int | None = None
        tuner = os.getpid()
        try:
            self._pid = os.fork()
        except OSError as error:
            raise TuneError(f"no process could be forked: {error.strerror}") from None
        if self._pid == 0:
            _become_guardian(self.control, theirs, tuner)
        theirs.close()

    def has(self, name: str) -> bool:
        """Whether a closure of that name is now what it was at the fork."""
        return name in self.known and self.known[name] is closures().get(name)

    def send_signal(self, number: int) -> None:
        """Sends the guardian a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def kill(self) -> None:
        """Kills the guardian alone."""
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """The guardian's exit code; None before its end."""
        if self.returncode is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                self.returncode = None if pid == 0 else os.waitstatus_to_exitcode(status)
        return self.returncode


def _become_guardian(ours: socket.socket, theirs: socket.socket, tuner: int) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)  # that of the tuner's event loop
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        ours.close()
        control = theirs.detach()
        code = mind(partial(_become_server, control), (control,), tuner)
    except BaseException as error:  # noqa: BLE001 - a fork never returns to the tuner's code
        os.write(2, f"the guardian of a fork server failed: {error!r}\n".encode())
        kill_descendants()
    finally:
        os._exit(code)


def _become_server(control: int, guardian: int) -> NoReturn:
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        die_with_parent(signal.SIGKILL, guardian)
        serve(control)
    finally:
        os._exit(0)
