"""Trials of lambdas and closures, which only the tuner's process has: they are forks of it.

    tuner -- copy of the tuner -- guardian -- trial

The copy is forked before the tuner's own threads begin, and does nothing but fork a guardian for each trial: a process with
threads must not be forked, since they would hold their locks for ever. Trials do not see what the tuner does after that. All
of them end with the tuner.

Over a socket of packets the tuner asks `[slot, "fork"]` (with the trial's socket and its crash file as descriptors) and
`[slot, "kill"]`; `[slot, exit code]` is answered once nothing of a trial is left.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import NoReturn

from counterpoint.transport.process import launch
from counterpoint.tune.errors import TuneError
from counterpoint.tune.executors.trial_process import run_trial
from counterpoint.tune.registry import closures

MAX_PACKET = 4096

END_SECONDS = 20.0
"""How long a copy may take to end once its socket is closed; it needs some milliseconds."""

KILLED = 128 + signal.SIGKILL

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
    torch = sys.modules.get("torch")
    return "CUDA" if torch is not None and torch.cuda.is_initialized() else ""


class TunerCopy:
    """A copy of this process, which forks trials of the closures that were there when it was made."""

    def __init__(self) -> None:
        """Forks it. Raises `TuneError` if this process must not be forked."""
        if unfit := reason_against_a_fork():
            raise TuneError(
                f"this process has {unfit}, so that no lambda or closure of it can be run by a fork; begin the experiment before "
                "that, or move the function to the top of its module"
            )
        self._known = closures()
        self._trials: dict[int, ForkedTrial] = {}
        self._count = 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        tuner = os.getpid()
        try:
            self._pid = os.fork()
        except OSError as error:
            raise TuneError(f"no process could be forked: {error.strerror}") from None
        if self._pid == 0:
            self._control.close()
            _become_copy(theirs, tuner)
        theirs.close()

    def has(self, name: str) -> bool:
        """Whether it lives, and a closure of that name is now what it was at the fork."""
        is_known = name in self._known and self._known[name] is closures().get(name)
        return is_known and self._control.fileno() >= 0

    def start(self, connection: int, crash: int) -> ForkedTrial:
        """Has a trial forked, with this socket and this file for its crash. Needs the event loop."""
        if not self._count:
            asyncio.get_running_loop().add_reader(self._control, self._read)
        self._count += 1
        trial = self._trials[self._count] = ForkedTrial(partial(self._ask, self._count, "kill"))
        self._ask(self._count, "fork", connection, crash)
        return trial

    def _ask(self, slot: int, what: str, *descriptors: int) -> None:
        with suppress(OSError):  # it is gone, which `_read` finds
            socket.send_fds(self._control, [json.dumps([slot, what]).encode()], descriptors)

    def _read(self) -> None:
        try:
            packet = self._control.recv(MAX_PACKET, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet:
            slot, code = json.loads(packet)
            self._trials.pop(slot).over.set_result(code)
            return
        self._close()  # every guardian has the socket, too: nothing of a trial is left
        for trial in self._trials.values():
            trial.over.set_result(KILLED)
        self._trials.clear()

    def _close(self) -> None:
        if self._control.fileno() >= 0:
            if self._count:
                asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()

    async def ended(self) -> None:
        """Ends it with all that it has forked, and waits until it has ended. Raises `TimeoutError`."""
        self._close()
        deadline = time.monotonic() + END_SECONDS
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:  # noqa: ASYNC222 - it does not wait
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                raise TimeoutError(f"the copy of the tuner (process {self._pid}) did not end in {END_SECONDS:g} s")
            await asyncio.sleep(0.002)


class ForkedTrial:
    """A process that a copy of the tuner has forked, as `Child` is one that was started."""

    def __init__(self, kill: partial[None]) -> None:
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._kill = kill

    async def ended(self) -> int:
        """Waits until nothing of it is left; returns its exit code."""
        return await asyncio.shield(self.over)

    async def killed(self) -> int:
        """Kills it with everything below it; returns the exit code."""
        self._kill()
        return await self.ended()


def _become_copy(control: socket.socket, tuner: int) -> NoReturn:
    try:
        launch.die_with_parent(signal.SIGKILL, tuner)
        launch.become_subreaper()
        signal.set_wakeup_fd(-1)  # that of the tuner's event loop
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)  # Ctrl-C on the terminal is the tuner's
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        gc.collect()
        gc.freeze()  # a collection in a fork would copy every page that it looks at
        _serve(control)
    except BaseException as error:  # noqa: BLE001 - a fork never returns to the tuner's code
        os.write(2, f"the copy of the tuner failed: {error!r}\n".encode())
    finally:
        os._exit(0)


def _serve(control: socket.socket) -> None:
    """Forks and kills as it is asked, until the tuner is gone."""
    guardians: dict[int, int] = {}

    def tell_of_ends(*_: object) -> None:
        for pid, code in launch.reap():
            slot = guardians.pop(pid, None)
            if slot is not None and code == KILLED:  # perhaps the guardian itself: what its trial left is here
                launch.kill_all(launch.orphans([*guardians]))
            if slot is not None:
                control.send(json.dumps([slot, code]).encode())

    signal.signal(signal.SIGCHLD, tell_of_ends)
    while True:
        packet, descriptors, _flags, _ = socket.recv_fds(control, MAX_PACKET, 2)
        if not packet:
            return
        slot, what = json.loads(packet)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # no end is told before its slot is known
        if what == "fork":
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                _become_guardian(control, parent, *descriptors)
            guardians[pid] = slot
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            for pid in [pid for pid, its_slot in guardians.items() if its_slot == slot]:
                os.kill(pid, signal.SIGHUP)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def _become_guardian(control: socket.socket, parent: int, connection: int, crash: int) -> NoReturn:
    code = 1

    def trial(guardian: int) -> None:
        control.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        launch.die_with_parent(signal.SIGKILL, guardian)
        run_trial(connection, crash)

    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        code = launch.guard(trial, 0, parent)
    except BaseException as error:  # noqa: BLE001 - as above
        os.write(2, f"the guardian of a trial failed: {error!r}\n".encode())
        launch.kill_descendants()
    finally:
        os._exit(code)
