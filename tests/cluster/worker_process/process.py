"""A worker's process for the tests, with a test in the place of its keeper."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from counterpoint.transport.process.keeper import messages
from counterpoint.transport.process.keeper.messages import MESSAGES
from tests.support.polling import wait_until


class WorkerProcess:
    """A process, what it said, and its output."""

    def __init__(self, directory: Path, class_name: str, **fields: Any) -> None:
        self._socket, other = socket.socketpair()
        self.log_file = directory / "log"
        environment = os.environ | {messages.CONTROL_FD: str(other.fileno()), "PYTHONUNBUFFERED": "1"}
        with other, self.log_file.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "counterpoint.cluster.worker_process"],
                env=environment,
                pass_fds=(other.fileno(),),
                stdout=output,
                stderr=output,
            )
        self._received = bytearray()
        self.messages: list[dict[str, Any]] = []
        known = {"job": "j", "role": "role", "rank": 0, "count": 1, "worker": "role-0", "incarnation": 1}
        path = f"tests.cluster.worker_process.workers:{class_name}"
        own = {"directory": str(directory), "import_path": path, "heartbeat_seconds": 0.1}
        self.send(messages.DESCRIPTION, description=known | own | fields)

    def send(self, kind: str, **fields: Any) -> None:
        self._socket.sendall(MESSAGES.frame({"kind": kind, **fields}))

    def said(self, kind: str) -> list[dict[str, Any]]:
        self._read()
        return [message for message in self.messages if message["kind"] == kind]

    def wait_for(self, kind: str) -> dict[str, Any]:
        wait_until(lambda: bool(self.said(kind)), kind, details=lambda: f"{self.messages} {self.log}")
        return self.said(kind)[0]

    def wait_for_start(self) -> None:
        self.wait_for(messages.READY)
        self.send(messages.START)
        self.wait_for(messages.STARTED)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def hooks(self) -> list[str]:
        return [line.removeprefix("hook ") for line in self.log.splitlines() if line.startswith("hook ")]

    def end(self) -> int:
        """Waits for the process's end; returns its exit code."""

        def ended() -> bool:
            self._read()
            return self.process.poll() is not None

        wait_until(ended, "the end of the process", details=lambda: self.log)
        self._read()
        return self.process.returncode

    def leave(self) -> None:
        """Goes, as a keeper that dies."""
        self._socket.close()

    def _read(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._socket.setblocking(False)
        try:
            while data := self._socket.recv(65536):
                self._received += data
                self.messages += MESSAGES.cut(self._received)
        except (BlockingIOError, ConnectionResetError):
            pass
        finally:
            self._socket.setblocking(True)


@contextmanager
def worker_process(directory: Path, class_name: str, **fields: Any) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(directory, class_name, **fields)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()
        worker.leave()
