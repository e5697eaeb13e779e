"""A process that has imported a trainable's module, and forks a process for each of its trials in milliseconds.

`multiprocessing`'s fork server with its preload does not serve: what it has forked outlives it, no minder takes what a trial
leaves behind, its first message is a pickle, and a module that starts a thread while it is imported would be forked all the same.

It runs below a guardian (`transport.process.launch`), which ends everything here when the executor dies. Each trial has a
*minder*, forked from here, and the trial's own process, forked from the minder. The minder inherits whatever the trial
leaves behind, and kills
it; its exit code is the trial's. So when `exited` is sent, nothing of the trial is left.

    executor -- guardian -- fork server -- minder -- trial -- what the trial starts

Over a socket of packets the executor asks `fork` (with the trial's socket and its crash file as descriptors) and `kill`; `ready`
and `exited` are said.

A process with threads must not be forked: they would hold their locks for ever. If importing the module starts a thread, or
initializes CUDA, or fails, this process begins anew without it (*cold*), and each trial imports the module for itself.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from counterpoint.transport.process import launch
from counterpoint.tune.executors.trial_process import run_trial
from counterpoint.tune.registry import load_module

MAX_PACKET = 4096

CUDA = "CUDA"

_WATCHED = (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


class ForkServer:
    """The server's loop."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._minders: dict[int, int] = {}
        """Slots by the pid of their minder."""
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Serves until the executor is gone."""
        launch.become_subreaper()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._say(kind="ready")
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._tell_of_ends()
            if self._control.fileno() in ready and not self._answer():
                return

    def _say(self, **message: Any) -> None:
        self._control.send(json.dumps(message).encode())

    def _answer(self) -> bool:
        try:
            packet, descriptors, _flags, _ = socket.recv_fds(self._control, MAX_PACKET, 2)
        except ConnectionResetError:  # the executor ended with something of ours unread
            return False
        if not packet:
            return False
        request = json.loads(packet)
        slot = int(request["slot"])
        if request["kind"] == "fork":
            self._fork(slot, *descriptors)
        else:
            for pid, its_slot in self._minders.items():
                if its_slot == slot:
                    kill_all_of(pid)
        return True

    def _tell_of_ends(self) -> None:
        for pid, code in launch.reap():
            slot = self._minders.pop(pid, None)
            if slot is None:
                continue
            if code > 128:  # the minder itself was killed, or has killed its trial: what it left is here
                launch.kill_all(launch.orphans([*self._minders]))
            self._say(kind="exited", slot=slot, code=code)

    def _fork(self, slot: int, connection: int, crash: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._say(kind="refused", slot=slot, error=f"no process could be forked: {error.strerror}")
        else:
            if pid == 0:
                self._become_minder(connection, crash)
            self._minders[pid] = slot
        os.close(connection)
        os.close(crash)

    def _become_minder(self, connection: int, crash: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for descriptor in (self._wake, self._woken):
                os.close(descriptor)
            self._control.close()
            trial = partial(_become_trial, connection, crash)
            code = mind(trial, (connection, crash), os.getppid())
        except BaseException as error:  # noqa: BLE001 - a fork never returns to its server's code
            os.write(2, f"the minder of a trial failed: {error!r}\n".encode())
            launch.kill_descendants()
        finally:
            os._exit(code)


def kill_all_of(minder: int) -> None:
    """Has a minder kill its trial and all below it, and end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(minder, signal.SIGTERM)


def mind(run: Callable[[int], NoReturn], descriptors: Sequence[int], parent: int) -> int:
    """Forks a process that runs, given our pid, and returns its exit code when nothing of it is left.

    It is killed with all below it on SIGTERM, and when our parent ends. The descriptors are the new process's.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    launch.become_subreaper()
    launch.die_with_parent(signal.SIGHUP, parent)
    os.setpgid(0, 0)
    minder = os.getpid()
    child = os.fork()
    if child == 0:
        run(minder)
    for descriptor in descriptors:
        os.close(descriptor)
    while True:
        number = signal.sigwait(_WATCHED)
        if number != signal.SIGCHLD:
            launch.kill_descendants()
            return 128 + signal.SIGKILL
        codes = dict(launch.reap())
        if child in codes:
            if _has_children():
                launch.kill_descendants()
            return codes[child]


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _become_trial(connection: int, crash: int, minder: int) -> NoReturn:
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        launch.die_with_parent(signal.SIGKILL, minder)
        _seed_anew()
        run_trial(connection, crash)
    finally:
        os._exit(1)


def _seed_anew() -> None:
    """Gives this fork random numbers of its own; `random` and `secrets` do that by themselves."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def unfit_to_fork() -> str:
    """Why this process must not be forked; empty if it may be."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return CUDA
    if threading.active_count() > 1:
        return f"a thread: {', '.join(thread.name for thread in threading.enumerate()[1:])}"
    return ""


def main(control: int, module: str, path: list[str], cold: bool) -> None:
    """Imports the trainable's module, unless `cold`, and serves."""
    sys.path[:] = path
    if not cold:
        try:
            load_module(module)
            unfit = unfit_to_fork()
        except BaseException as error:  # noqa: BLE001 - the trial will say so, when it imports the module itself
            unfit = repr(error)
        if unfit:
            os.set_inheritable(control, True)
            os.execv(sys.executable, command(control, module, path, cold=True))
    os.set_inheritable(control, False)
    serve(control)


def serve(control: int) -> None:
    """Serves over the descriptor until the executor is gone."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that it looks at
    ForkServer(socket.socket(fileno=control)).run()


def command(control: int, module: str, path: list[str], cold: bool = False) -> list[str]:
    """Returns the command that runs a fork server, to which the descriptor `control` is inherited."""
    given = json.dumps([control, module, path, cold])
    return [sys.executable, "-P", "-m", "counterpoint.tune.executors.fork_server", given]


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
