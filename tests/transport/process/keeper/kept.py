"""A keeper that a test starts, and masters of it: blocking, message by message."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from counterpoint.transport.process.keeper import main, messages
from counterpoint.transport.process.keeper.messages import MESSAGES
from tests.support.polling import wait_until

SERVICE = """
import os, signal, sys, time
from counterpoint.transport.process.notify import notify
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("worker", os.getpid(), flush=True)
notify("READY=1\\nSTATUS=serving")
time.sleep(600)
"""


class Peer:
    """One connection to a keeper."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.connect(os.fspath(path))
        except OSError:
            self.socket.close()
            raise
        self._received = bytearray()
        self.messages: list[dict[str, Any]] = []
        self.is_closed = False

    def send(self, kind: str, **fields: Any) -> None:
        self.socket.sendall(MESSAGES.frame({"kind": kind, **fields}))

    def hello(self, epoch: int, lease_seconds: float = 60.0, **fields: Any) -> None:
        self.send(messages.HELLO, epoch=epoch, lease_seconds=lease_seconds, **fields)

    def read(self) -> None:
        self.socket.setblocking(False)
        try:
            while data := self.socket.recv(65536):
                self._received += data
                self.messages += MESSAGES.cut(self._received)
            self.is_closed = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.is_closed = True
        finally:
            self.socket.setblocking(True)

    def said(self, kind: str) -> list[dict[str, Any]]:
        self.read()
        return [message for message in self.messages if message["kind"] == kind]

    def wait_for(self, kind: str) -> dict[str, Any]:
        wait_until(lambda: bool(self.said(kind)), kind, details=lambda: str(self.messages))
        return self.said(kind)[-1]

    def wait_for_end(self) -> None:
        def closed() -> bool:
            self.read()
            return self.is_closed

        wait_until(closed, "the end of the connection")


class Kept:
    """A keeper's process; its first master is `master`, of epoch 1."""

    def __init__(
        self, directory: Path, code: str = SERVICE, lease_seconds: float = 60.0, owner: int = 0, **fields: Any
    ) -> None:
        self.path, self.log_file = directory / "w-0.1.1.sock", directory / "log"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, self.log_file.open("wb") as log:
            listener.bind(os.fspath(self.path))
            listener.listen(4)
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", main.__file__, os.fspath(self.path), *([str(owner)] if owner else [])],
                stdin=listener.fileno(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.peers: list[Peer] = []
        self.master = self.peer()
        order = {"worker": "w-0", "incarnation": 1, "bundle": "w-0", "node": "node-0", "socket": os.fspath(self.path)}
        known = {"environment": {}, "nice": 0, "notifies": True, "silence_timeout_seconds": None, "description": {}}
        command = {"command": [sys.executable, "-c", code], "stop_timeout_seconds": 30.0}
        self.master.hello(1, lease_seconds, order=order | known | command | fields)

    def peer(self) -> Peer:
        self.peers.append(Peer(self.path))
        return self.peers[-1]

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def worker(self) -> int:
        pid: int = self.master.wait_for(messages.CREATED)["pid"]
        return pid

    @property
    def memory(self) -> int:
        """Its resident memory, in bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def wait_for_end(self) -> None:
        wait_until(lambda: self.process.poll() is not None, "the end of the keeper", details=lambda: self.log)


@contextmanager
def kept(directory: Path, code: str = SERVICE, lease_seconds: float = 60.0, **fields: Any) -> Iterator[Kept]:
    keeper = Kept(directory, code, lease_seconds, **fields)
    try:
        yield keeper
    finally:
        for number in (signal.SIGCONT, signal.SIGHUP):
            keeper.process.send_signal(number)
        with suppress(OSError):
            last = keeper.peer()
            last.hello(1000)
            last.send(messages.END)
        keeper.wait_for_end()
        for peer in keeper.peers:
            peer.socket.close()


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
