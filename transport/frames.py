"""Messages with their length before them, on a pipe, a socket or a stream: the one way to make them and to cut them apart.

A frame is the length of a message in four bytes, then the message. A length above what both ends have agreed on is refused before
memory is taken for it. This file imports nothing outside the standard library: the sandbox's interpreter has nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

TYPE_CHECKING = False  # as type checkers know it; to import `typing` takes a keeper 5 ms
if TYPE_CHECKING:
    from asyncio import StreamReader
    from typing import Literal

_READ_BYTES = 2**18
"""Memory is taken for so much at once, and for more only once that has come."""


class BadFrame(ValueError):
    """The other side has sent, or is to be sent, what is no message or too long a one. The text says what was found."""


class Framing:
    """How messages travel on connections of one kind: of at most `most` bytes each, with the byte order of the length."""

    def __init__(self, most: int, order: Literal["<", ">"] = "<") -> None:
        self.most = most
        self._length = struct.Struct(f"{order}I")

    def frame(self, message: bytes) -> bytes:
        """Returns a message after its length. Raises `BadFrame` if it is too long."""
        if len(message) > self.most:
            raise BadFrame(f"a message has {len(message)} bytes; at most {self.most} are sent")
        return self._length.pack(len(message)) + message

    def read(self, receive: Callable[[int], bytes]) -> bytes | None:
        """Returns the next message of a connection that blocks; None at its end.

        `receive` is a file's `read` or a socket's `recv`. Raises `BadFrame`, and `EOFError` if the end comes within a message.
        """
        head = _exactly(receive, self._length.size)
        if not head:
            return None
        return _exactly(receive, self._announced(head), head)

    async def read_from(self, reader: StreamReader) -> bytes:
        """Returns the next message. Raises `BadFrame`, and at the end `asyncio.IncompleteReadError`, which is an `EOFError`."""
        return await reader.readexactly(self._announced(await reader.readexactly(self._length.size)))

    def cut(self, received: bytearray) -> Iterator[bytes]:
        """Removes the whole messages from the beginning of what was received; yields each. Raises `BadFrame`."""
        head = self._length.size
        while len(received) >= head and len(received) >= (end := head + self._announced(received[:head])):
            message = bytes(received[head:end])
            del received[:end]
            yield message

    def _announced(self, head: bytes | bytearray) -> int:
        length: int = self._length.unpack(head)[0]
        if length > self.most:
            raise BadFrame(f"a message of {length} bytes is announced; at most {self.most} are read")
        return length


def _exactly(receive: Callable[[int], bytes], count: int, before: bytes = b"") -> bytes:
    """Returns `count` bytes; nothing if the end comes before the first. `before` was read of the same message."""
    received = bytearray()
    while len(received) < count:
        part = receive(min(count - len(received), _READ_BYTES))
        if not part and (received or before):
            raise EOFError(f"the other side ended within a message, after {len(received)} of {count} bytes")
        if not part:
            return b""
        received += part
    return bytes(received)
