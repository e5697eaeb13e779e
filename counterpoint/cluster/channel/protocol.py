"""The messages between the host of a channel and its peers: `[kind, header, frame...]`, and how each is checked.

The header is a flat msgpack list; the frames are those of records, which only the ends decode
(`counterpoint/cluster/calls/codec.py`). What does not fit is a `CodecError`, before anything is made of it. A connection begins
with an empty frame, which ZMQ sends by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgpack
import msgspec
from msgspec import Meta

from counterpoint.transport.arrays import CodecError
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.typed import typed
from counterpoint.transport.unpacked import shown, unpacked

PROTOCOL = 1

HELLO, WANT, PUT, SKIP, END, ACKNOWLEDGE, PING, BYE = (
    b"HELLO",
    b"WANT",
    b"PUT",
    b"SKIP",
    b"END",
    b"ACK",
    b"PING",
    b"BYE",
)
WELCOME, RESET, GRANT, CONFIRM, REFUSE, DELIVER, FINISH, REJECTED, PONG = (
    *(b"WELCOME", b"RESET", b"GRANT", b"CONFIRM", b"REFUSE"),
    *(b"DELIVER", b"FINISH", b"REJECTED", b"PONG"),
)

PROBE = b""
"""What ZMQ sends first on a connection."""

PRODUCER: Final = "producer"
CONSUMER: Final = "consumer"

MAX_HEADER_BYTES = 2**20
MAX_RECORDS = 2**12
"""Records of one message."""
MAX_NAME = 128
MAX_REASON = 1000
MAX_NUMBER = 2**62

RECORDS_AT_ONCE, BYTES_AT_ONCE = 256, 2**20
"""A sender begins another message after so many records or bytes."""


Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who a peer is. Of two with one name the later one counts: first by incarnation, then by the time of its start."""

    kind: Literal["producer", "consumer"]
    name: Name
    incarnation: Annotated[int, Meta(ge=0)]
    started: Annotated[int, Meta(ge=0)]
    """`time.time_ns()` when the end was made."""
    credit: Annotated[int, Meta(ge=1, le=MAX_RECORDS)]
    sticky: bool

    @property
    def age(self) -> tuple[int, int]:
        """Rises from one process of a name to the next."""
        return self.incarnation, self.started


class RecordHead(msgspec.Struct, frozen=True, array_like=True):
    """What is said of a record beside its frames. `number` is the sender's: the producer's count, or the sequence number."""

    number: Number
    origin: Name
    position: Number
    frames: Annotated[int, Meta(ge=1)]


def pack(kind: bytes, header: object = None, frames: Sequence[Buffer] = ()) -> list[Buffer]:
    """Returns the frames of a message."""
    return [kind, msgpack.packb(header), *frames]


def unpack(frames: Sequence[Buffer]) -> tuple[bytes, Any, Sequence[Buffer]]:
    """Returns kind, header and further frames. Raises `CodecError`."""
    if len(frames) == 1 and not as_bytes_view(frames[0]).nbytes:
        return PROBE, None, ()
    if len(frames) < 2:
        raise CodecError(f"{len(frames)} frames are no message; expected a kind and a header")
    kind, header = as_bytes_view(frames[0]), as_bytes_view(frames[1])
    if kind.nbytes > 16 or header.nbytes > MAX_HEADER_BYTES:
        raise CodecError(
            f"a kind of {kind.nbytes} bytes and a header of {header.nbytes}; at most 16 and {MAX_HEADER_BYTES}"
        )
    limits = {"max_array_len": 5 * MAX_RECORDS, "max_map_len": 0, "max_ext_len": 0, "max_bin_len": 0}
    return bytes(kind), unpacked(header, "the header", CodecError, **limits), frames[2:]


def pack_hello(hello: Hello) -> list[Buffer]:
    """Returns the frames of a hello."""
    return pack(HELLO, [PROTOCOL, *msgspec.structs.astuple(hello)])


def hello_of(header: object) -> Hello:
    """Reads a hello. Raises `CodecError`."""
    match header:
        case [int(protocol), *_] if protocol != PROTOCOL:
            raise CodecError(f"protocol {protocol}; this host speaks {PROTOCOL}")
        case [int(), *fields]:
            return typed(fields, Hello, "a hello", CodecError)
    raise CodecError(f"{shown(header)} is no hello")


def pack_records(kind: bytes, records: Sequence[tuple[RecordHead, Sequence[Buffer]]], floor: int = 0) -> list[Buffer]:
    """Returns the frames of a message of records. `floor` is the host's lowest unacknowledged sequence number."""
    header: list[object] = [floor]
    frames: list[Buffer] = []
    for head, own in records:
        header += (head.number, head.origin, head.position, len(own))
        frames += own
    return pack(kind, header, frames)


def records_of(header: object, frames: Sequence[Buffer]) -> tuple[int, list[tuple[RecordHead, Sequence[Buffer]]]]:
    """Reads the floor and the records of a message. Raises `CodecError`."""
    if not isinstance(header, list) or len(header) % 4 != 1 or not number(header[0]):
        raise CodecError(f"{shown(header)} describes no records")
    records: list[tuple[RecordHead, Sequence[Buffer]]] = []
    taken = 0
    for index in range(1, len(header), 4):
        head = typed(header[index : index + 4], RecordHead, f"record {index // 4}", CodecError)
        if head.frames > len(frames) - taken:
            raise CodecError(f"record {index // 4} has {head.frames} frames; {len(frames) - taken} are left")
        records.append((head, frames[taken : taken + head.frames]))
        taken += head.frames
    if taken != len(frames):
        raise CodecError(f"the header describes {taken} frames, {len(frames)} are present")
    return header[0], records


def numbers_of(header: object) -> list[int]:
    """Reads a list of whole numbers. Raises `CodecError`."""
    if not isinstance(header, list) or not all(map(number, header)):
        raise CodecError(f"{shown(header)} is no list of numbers from 0 on")
    return header


def number(value: object) -> bool:
    """Whether it is a number that counts something."""
    return type(value) is int and 0 <= value <= MAX_NUMBER
