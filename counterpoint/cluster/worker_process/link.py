"""A worker process's end of the control socket to its keeper. Its threads block; the keeper's end does not."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

from counterpoint.transport.process.keeper.messages import CONTROL_FD, MESSAGES, WORDS

CHUNK = 256 * 1024

LONGEST_TEXT = 10_000
"""Characters of a text that are sent; the keeper shows fewer."""


def _text(value: Any) -> Any:
    """Returns a text as it can be sent: a reason or a status is the user's, and may hold anything."""
    return value[:LONGEST_TEXT].encode(errors="backslashreplace").decode() if isinstance(value, str) else value


class InheritedLink:
    """The socket that this process inherited."""

    def __init__(self) -> None:
        """Takes the socket, so that no process below this one inherits it. Raises `RuntimeError` without one."""
        number = os.environ.pop(CONTROL_FD, "")
        if not number.isdecimal():
            raise RuntimeError(f"${CONTROL_FD} is {number!r}; a keeper sets it, so start workers by a job")
        self._socket = socket.socket(fileno=int(number))
        self._socket.set_inheritable(False)
        self._lock = threading.Lock()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message; waits while the keeper does not read. Raises `OSError` when the keeper is gone."""
        data = WORDS.frame({"kind": kind} | {name: _text(value) for name, value in fields.items()})
        with self._lock:
            self._socket.sendall(data)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yields what the keeper sends, until it is gone. Raises `BadFrame`."""
        received = bytearray()
        while True:
            try:
                data = self._socket.recv(CHUNK)
            except ConnectionResetError:
                return
            if not data:
                return
            received += data
            yield from MESSAGES.cut(received)
