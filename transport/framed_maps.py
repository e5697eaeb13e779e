"""MessagePack maps with a `kind`, each in a frame: between a tuner and its trials. Never pickle."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgpack

from counterpoint.transport.frames import BadFrame, Framing
from counterpoint.transport.unpacked import unpacked

CHUNK = 64 * 1024
LEFT_CHUNKS = 64
"""Chunks that an ended process may have left unread; they are more than a socket's buffer holds."""


class FramedMaps:
    """The messages of connections of one kind. All methods raise `BadFrame`."""

    def __init__(self, framing: Framing) -> None:
        self._framing = framing

    def pack(self, message: Mapping[str, Any]) -> bytes:
        """Returns a message as bytes."""
        try:
            data: bytes = msgpack.packb(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise BadFrame(f"a message of kind {message.get('kind')!r} cannot be packed: {error}") from None
        if len(data) > self._framing.most:
            raise BadFrame(
                f"a message of kind {message.get('kind')!r} has {len(data)} bytes; at most {self._framing.most} are sent"
            )
        return data

    def unpack(self, data: bytes) -> dict[str, Any]:
        """Returns the message in `data`."""
        if len(data) > self._framing.most:
            raise BadFrame(f"a message has {len(data)} bytes; at most {self._framing.most} are read")
        message = unpacked(data, "a message", BadFrame)
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise BadFrame("a message is not a map with a `kind`")
        return message

    def frame(self, message: Mapping[str, Any]) -> bytes:
        """Returns a message after its length."""
        return self._framing.frame(self.pack(message))

    def read(self, receive: Callable[[int], bytes]) -> dict[str, Any] | None:
        """Returns the next message of a connection that blocks; None at its end. Raises also as `Framing.read`."""
        data = self._framing.read(receive)
        return None if data is None else self.unpack(data)

    def cut(self, received: bytearray) -> Iterator[dict[str, Any]]:
        """Removes the whole messages from the beginning of what was received; yields each."""
        return map(self.unpack, self._framing.cut(received))


class Frames(Protocol):
    """How the messages of a channel are written and read, as by `FramedMaps`."""

    def frame(self, message: Mapping[str, Any]) -> bytes:
        """Returns a message after its length. Raises `BadFrame`."""

    def cut(self, received: bytearray) -> Iterator[dict[str, Any]]:
        """Removes the whole messages from the beginning of what was received; yields each. Raises `BadFrame`."""


class FramedChannel:
    """One end of a socket of such maps on an event loop: it never waits to send, and hands over each message that comes."""

    def __init__(
        self,
        connection: socket.socket,
        messages: Frames,
        on_message: Callable[[dict[str, Any]], None],
        on_bad: Callable[[str], None],
        on_gone: Callable[[], None] = lambda: None,
        most_unsent: int = sys.maxsize,
    ) -> None:
        """Takes the socket; `on_bad` hears of a `BadFrame`, `on_gone` that the other end is gone: no more is read then.

        At most `most_unsent` bytes wait for an end that does not read.
        """
        from asyncio import get_running_loop  # no process of a worker or a trial needs it

        connection.setblocking(False)
        self._socket, self._messages, self._most_unsent = connection, messages, most_unsent
        self._on_message, self._on_bad, self._on_gone = on_message, on_bad, on_gone
        self._received, self._unsent = bytearray(), bytearray()
        self._loop = get_running_loop()
        self._reads = True
        self._loop.add_reader(connection, self._read, 1)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Sends a message, now or once the other end reads; returns False if too much waits. Raises `BadFrame`."""
        data = self._messages.frame(message)
        if len(self._unsent) + len(data) > self._most_unsent:
            return False
        if self._socket.fileno() >= 0:
            self._unsent += data
            self._write()
        return True

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent[:CHUNK])]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._write)
            return
        except OSError:  # the other end is gone
            self._unsent.clear()
        self._loop.remove_writer(self._socket)

    def drain(self) -> None:
        """Delivers what an ended process left unread: its last words."""
        self._read(LEFT_CHUNKS)

    def _read(self, chunks: int) -> None:
        """Reads at most so much: the other end may write faster than it is read, and the loop has others to hear."""
        for _ in range(chunks):
            if not self._reads:
                return
            try:
                data = self._socket.recv(CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._stop_reading()
                self._on_gone()
                return
            self._received += data
            try:
                for message in self._messages.cut(self._received):
                    if self._reads:
                        self._on_message(message)
            except BadFrame as error:
                self._stop_reading()
                self._on_bad(str(error))

    def _stop_reading(self) -> None:
        self._reads = False
        self._loop.remove_reader(self._socket)

    def close(self) -> None:
        """Closes the socket; nothing is delivered any more. Safe to call twice."""
        if self._socket.fileno() >= 0:
            self._stop_reading()
            self._loop.remove_writer(self._socket)
            self._socket.close()
