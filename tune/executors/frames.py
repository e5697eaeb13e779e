"""Messages between an executor and the process of a trial: MessagePack with its length before it, over a socket of their own.

Never pickle. Both ends refuse a message beyond `MAX_BYTES` before they allocate anything for it. The process's end blocks
(`receive`, `send`); the executor's end belongs to its event loop (`FrameChannel`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgpack

MAX_BYTES = 16 * 2**20
"""The size of one message: far more than a result or a config has."""

_LENGTH = struct.Struct("<I")
_READ_BYTES = 256 * 2**10


class BadFrame(Exception):
    """The other end has sent what is no message of this protocol, or one that is too large."""


def encode(message: dict[str, Any]) -> bytes:
    """Returns the bytes of a message. Raises `BadFrame` if it is too large, or holds what MessagePack has no form for."""
    try:
        body: bytes = msgpack.packb(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadFrame(f"a message cannot be written: {error}") from None
    if len(body) > MAX_BYTES:
        raise BadFrame(f"a message has {len(body)} bytes; at most {MAX_BYTES} are sent")
    return _LENGTH.pack(len(body)) + body


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends a message; blocks."""
    connection.sendall(encode(message))


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Returns the next message; None when the other end is gone. Blocks. Raises `BadFrame`."""
    header = _exactly(connection, _LENGTH.size)
    if header is None:
        return None
    body = _exactly(connection, _length(header))
    return None if body is None else _decode(body)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        try:
            part = connection.recv(min(count, _READ_BYTES))
        except ConnectionResetError:
            return None
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _length(header: bytes | memoryview) -> int:
    length: int = _LENGTH.unpack(header)[0]
    if length > MAX_BYTES:
        raise BadFrame(f"a message of {length} bytes was announced; at most {MAX_BYTES} are read")
    return length


def _decode(body: bytes | memoryview) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(body)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise BadFrame(f"a message is no MessagePack: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise BadFrame("a message is no dict with a kind")
    return message


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
        """Sends what is left for the kernel later, if it does not take it now. Raises `BadFrame` as `encode` does."""
        data = encode(message)
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
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            body = start + _LENGTH.size
            end = body + _length(bytes(self._received[start:body]))
            if len(self._received) < end:
                break
            message = _decode(bytes(self._received[body:end]))
            start = end
            if not self._closed:
                self._on_message(message)
        del self._received[:start]

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
