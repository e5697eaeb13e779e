"""Messages between an executor and the process of a trial: MessagePack with its length before it, over a socket of their own.

Never pickle. Both ends refuse a message beyond `MAX_BYTES` before they allocate anything for it. The process's end blocks
(`receive`, `MESSAGES.frame`); the executor's end belongs to its event loop (`FrameChannel`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from counterpoint.transport.framed_maps import FramedMaps
from counterpoint.transport.frames import BadFrame, Framing

MAX_BYTES = 16 * 2**20
"""The size of one message: far more than a result or a config has."""

_READ_BYTES = 256 * 2**10


MESSAGES = FramedMaps(Framing(MAX_BYTES))


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Returns the next message; None when the other end is gone. Blocks. Raises `BadFrame`."""
    try:
        return MESSAGES.read(connection.recv)
    except (ConnectionResetError, EOFError):
        return None


class FrameChannel:
    """The executor's end: reads when the loop says that there is something, and never waits to send."""

    def __init__(
        self,
        connection: socket.socket,
        on_message: Callable[[dict[str, Any]], None],
        on_bad: Callable[[str], None],
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes the socket, and closes it at `close` or when the other end is gone, of which `on_gone` hears.

        `on_bad` hears of a `BadFrame`, after which nothing more is read.
        """
        connection.setblocking(False)
        self._socket = connection
        self._on_message, self._on_bad, self._on_gone = on_message, on_bad, on_gone
        self._received = bytearray()
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._loop.add_reader(connection, self._read)

    def send(self, message: dict[str, Any]) -> None:
        """Sends what is left for the kernel later, if it does not take it now. Raises `BadFrame`."""
        data = MESSAGES.frame(message)
        if self._closed:
            return
        if not self._unsent:
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                data = data[self._socket.send(data) :]
            if not data:
                return
            self._loop.add_writer(self._socket, self._write)
        self._unsent += data

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:  # the other end is gone; the exit of its process says so
            sent = len(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            part = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self.close()
            self._on_gone()
            return
        self._received += part
        try:
            self._deliver()
        except BadFrame as error:
            self.close()
            self._on_bad(str(error))

    def _deliver(self) -> None:
        for message in MESSAGES.cut(self._received):
            if not self._closed:
                self._on_message(message)

    def drain(self) -> None:
        """Delivers what has arrived and was not read yet: the last words of a process that has ended."""
        while not self._closed:
            before = len(self._received)
            self._read()
            if len(self._received) == before:
                return

    def close(self) -> None:
        """Closes the socket; nothing is delivered any more."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
