"""The executor's end of a fork server: starts it, asks it for processes, and hears of their ends. Lives on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from counterpoint.environments.import_path import search_working_directory
from counterpoint.transport.process.launch import guarded
from counterpoint.tune.executors.fork_server import MAX_PACKET, command
from counterpoint.tune.executors.forked_here import ForkedHere

END_SECONDS = 20.0
"""How long a guardian may take to kill everything below a fork server; it needs some milliseconds."""


class ForkClient:
    """The client of one fork server."""

    def __init__(
        self,
        module: str,
        on_exited: Callable[[int, int], None],
        on_refused: Callable[[int, str], None],
        on_lost: Callable[[ForkClient], None],
        cold: bool = False,
        forked: ForkedHere | None = None,
    ) -> None:
        """Starts it, unless it is `forked` already.

        `on_exited` hears a slot and its exit code, `on_refused` a slot and the reason, `on_lost` that the server died.
        """
        self.module, self.cold, self.forked = module, cold, forked
        self.ready = False
        self._on_exited, self._on_refused, self._on_lost = on_exited, on_refused, on_lost
        self._loop = asyncio.get_running_loop()
        self._guardian: subprocess.Popen[bytes] | ForkedHere
        if forked is None:
            self._guardian, self._control = _started(module, cold)
        else:
            self._guardian, self._control = forked, forked.control
        self._control.setblocking(False)
        self._unsent: list[tuple[bytes, list[int]]] = []
        self._loop.add_reader(self._control, self._read)

    def fork(self, slot: int, connection: socket.socket, crash: int) -> None:
        """Asks for a process with this socket and this file for its crash. Both descriptors are the server's afterwards."""
        self._send({"kind": "fork", "slot": slot}, [connection.detach(), crash])

    def kill(self, slot: int) -> None:
        """Asks for the end of a process and all below it; its exit is told as any other."""
        self._send({"kind": "kill", "slot": slot}, [])

    def _send(self, request: dict[str, Any], descriptors: list[int]) -> None:
        self._unsent.append((json.dumps(request).encode(), descriptors))
        if len(self._unsent) == 1 and not self._write():
            self._loop.add_writer(self._control, self._write_more)

    def _write(self) -> bool:
        """Sends what the kernel takes; returns whether that was all."""
        while self._unsent:
            packet, descriptors = self._unsent[0]
            try:
                socket.send_fds(self._control, [packet], descriptors)
            except BlockingIOError:
                return False
            except OSError:  # the server is gone, which `_read` finds
                pass
            for descriptor in descriptors:
                os.close(descriptor)
            del self._unsent[0]
        return True

    def _write_more(self) -> None:
        if self._write():
            self._loop.remove_writer(self._control)

    def _read(self) -> None:
        while True:
            try:
                packet = self._control.recv(MAX_PACKET)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._lose()
                return
            said = json.loads(packet)
            if said["kind"] == "ready":
                self.ready = True
            elif said["kind"] == "refused":
                self._on_refused(said["slot"], said["error"])
            else:
                self._on_exited(said["slot"], said["code"])

    def _lose(self) -> None:
        self._close()
        self._on_lost(self)

    def end(self) -> None:
        """Has the guardian kill the server and everything below it, without waiting."""
        with contextlib.suppress(ProcessLookupError):
            self._guardian.send_signal(signal.SIGHUP)

    async def ended(self) -> None:
        """Ends it, and waits until nothing is left."""
        self.end()
        self._close()
        deadline = self._loop.time() + END_SECONDS
        while self._guardian.poll() is None:
            if self._loop.time() > deadline:
                self._guardian.kill()
                raise TimeoutError(f"what the trials of {self.module} left could not be killed in {END_SECONDS:g} s")
            await asyncio.sleep(0.002)

    def _close(self) -> None:
        if self._control.fileno() < 0:
            return
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
        self._control.close()
        for _, descriptors in self._unsent:
            for descriptor in descriptors:
                os.close(descriptor)
        self._unsent.clear()


def _started(module: str, cold: bool) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            guardian = subprocess.Popen(
                guarded(command(theirs.fileno(), module, search_path(), cold)),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
    except BaseException:
        ours.close()
        raise
    return guardian, ours


def search_path() -> list[str]:
    """Returns the path on which this process finds modules, so that one started elsewhere finds them, too."""
    search_working_directory()
    return [os.path.abspath(entry) for entry in sys.path]
