"""Frames of model calls: many calls share one connection between a client and a server of ours.

An HTTP exchange a call costs either side more than the call: a connection each, whose bytes wake the loop alone, and a head to
write and to parse. A client instead asks once, by an ordinary request to `CALLS_PATH` with `Upgrade: counterpoint-calls`, so all
that guards a server guards this, too. After the answer 101 both sides send frames:

    call number, kind or status, length of the body (little-endian, unsigned: 4, 2, 4 bytes) | body

The client's are calls (`wire.encode_request`) and, without a body, their aborts. The server answers each call once, an aborted
one too, with a status of HTTP and the body that a POST would have. Only calls with small answers come this way.
"""

from __future__ import annotations

import asyncio
import struct

from counterpoint.inference.base import GenerateRequest

CALLS_PATH = "/counterpoint/v1/calls"
UPGRADE = "counterpoint-calls"

MOST_BYTES_HEADER = "X-Counterpoint-Most-Bytes"
"""Where the answer 101 says how long a call may be. A longer one is a POST, which is refused alone."""

CALL, ABORT = 0, 1
"""The kinds of a client's frames."""

ABORTED = 499
"""The status that answers a call which its client has aborted."""

MOST_CALLS = 1 << 14
"""Calls that are not answered yet, of one connection."""

MOST_ANSWER_BYTES = 1 << 21
"""The longest answer."""

LAST_NUMBER = (1 << 32) - 1

_HEAD = struct.Struct("<IHI")
_TOKEN_BYTES = 8
"""A token's id and log-probability, whether it was sampled or is an alternative."""
_OTHER_BYTES = 1 << 16
"""More than all else that a completion has."""

Frame = tuple[int, int, bytes]
"""The number of a call, the kind or the status, and the body."""


class MalformedFrames(Exception):
    """The other side sends what is no frame; the message continues a sentence that begins with its name."""


def taken(most_bytes: int) -> bytes:
    """Returns the answer 101 of a server that takes calls of at most so many bytes."""
    lines = ("HTTP/1.1 101 Switching Protocols", "Connection: Upgrade", f"Upgrade: {UPGRADE}")
    return "\r\n".join((*lines, f"{MOST_BYTES_HEADER}: {most_bytes}", "", "")).encode()


def has_small_answer(request: GenerateRequest) -> bool:
    """Whether the answer fits, if the server returns no routing."""
    sampling = request.sampling
    return sampling.max_tokens * _TOKEN_BYTES * (1 + sampling.alternatives) + _OTHER_BYTES <= MOST_ANSWER_BYTES


class FrameSplitter:
    """Splits the bytes of one side, however they come, into frames with bodies of at most `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held = bytearray()
        """The beginning of a frame."""
        self._needed = 0
        """Bytes with which more can be said of that."""

    @property
    def held(self) -> int:
        """Bytes of a frame that has not come whole."""
        return len(self._held)

    def split(self, data: bytes) -> list[Frame]:
        """Returns the frames that `data` completes. Raises `MalformedFrames` for one that is too long."""
        if self._held:
            self._held += data
            if len(self._held) < self._needed:
                return []
            data = bytes(self._held)
            self._held.clear()
        frames, at, end = [], 0, len(data)
        while end - at >= _HEAD.size:
            number, kind, length = _HEAD.unpack_from(data, at)
            if length > self._most_bytes:
                raise MalformedFrames(f"announces {length} bytes of call {number}; at most {self._most_bytes} are read")
            body_at = at + _HEAD.size
            if end - body_at < length:
                self._needed = _HEAD.size + length
                break
            at = body_at + length
            frames.append((number, kind, data[body_at:at]))
        else:
            self._needed = _HEAD.size
        self._held += data[at:]
        return frames


class FrameSender:
    """Writes the frames of one turn of the loop together."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0

    @property
    def unsent(self) -> int:
        """Bytes that the kernel has not taken."""
        return self._waiting_bytes + self._transport.get_write_buffer_size()

    def send(self, number: int, kind: int, body: bytes = b"") -> None:
        """Sends a frame at the end of the loop's turn, unless the connection is about to close by then."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting_bytes += _HEAD.size + len(body)
        self._waiting += (_HEAD.pack(number, kind, len(body)), body)

    def flush(self) -> None:
        """Writes what waits."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if waiting and not self._transport.is_closing():
            self._transport.write(b"".join(waiting))
