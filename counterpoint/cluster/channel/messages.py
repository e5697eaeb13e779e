"""What the ends of a channel ask its host, and its answers: `[header, frame...]`, and how each is checked.

The header is a message's fields in msgpack; the frames are those of records, which only the ends decode. What does not fit is a
`CodecError`, before anything is made of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from counterpoint.transport.arrays import CodecError
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.rpc.connection import size_of
from counterpoint.transport.typed import typed
from counterpoint.transport.unpacked import unpacked

PRODUCER: Final = "producer"
CONSUMER: Final = "consumer"
PUT: Final = "put"
SKIP: Final = "skip"
END: Final = "end"
REJECTED = "rejected"
"""The host does not serve this end any more. Any other failure ends the session, and the end begins another."""

MAX_HEADER_BYTES, MAX_RECORDS, MAX_FRAMES = 2**20, 2**12, 2**14
RECORDS_AT_ONCE, BYTES_AT_ONCE = 256, 2**20
"""A message takes no further record once it has so many, or so many bytes: the other end sees it only when all has come."""
RECORDS_AHEAD, BYTES_AHEAD = 512, 2**25
"""A producer sends further records while fewer of them, and fewer bytes, are unanswered."""
TURNS = 6
"""Turns that are open. The host keeps one, and answers the others: with fewer, no large record is on its way to a consumer while
the turn that asks for the next one waits to be read."""

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Number = Annotated[int, Meta(ge=0, le=2**62)]
Numbers = Annotated[list[Number], Meta(max_length=MAX_RECORDS)]
Kind = Literal["put", "skip", "end"]
Leaving = Literal["", "ended", "failed"]


class ChannelError(ConnectionError):
    """The channel does not serve this end any more; the message says why."""


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is said of a record beside its frames. `number` is the producer's count, or the channel's sequence number."""

    kind: Kind
    number: Number
    origin: Name
    position: Number
    frames: Number


Framed = tuple[Head, Sequence[Buffer]]
Heads = Annotated[list[Head], Meta(max_length=MAX_RECORDS)]


class Who(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An end. Of two with one name the later one counts: first by incarnation, then by `time.time_ns()` of its start."""

    kind: Literal["producer", "consumer"]
    name: Name
    incarnation: Number
    started: Number
    credit: Annotated[int, Meta(ge=1, le=MAX_RECORDS)] = 1
    sticky: bool = False


class ChannelTurn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an end asks: to take a producer's orders, or what a consumer has done with, and to tell what there is to tell.

    The first turn of a session has number 0 and nothing else. Several are open, of which the host answers the oldest, so that a
    broken connection is known by those that are left.
    """

    who: Who
    session: Number
    heads: Heads = []
    done: Numbers = []
    leaving: Leaving = ""
    protocol: Literal[2] = 2


class Told(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the host answers: orders that are stored or refused, and records that are lent. None below `floor` will come again."""

    session: Number
    generation: str
    next_position: Number
    """The lowest of the producer's own that the channel lacks."""
    confirmed: Numbers = []
    refused: list[tuple[Number, str]] = []
    heads: Heads = []
    floor: Number = 0
    finished: bool = False


def pack(message: ChannelTurn | Told, frames: Sequence[Buffer] = ()) -> list[Buffer]:
    """Returns the frames of a message."""
    return [msgspec.msgpack.encode(message), *frames]


def unpack(frames: Sequence[Buffer], kind: Any) -> tuple[Any, Sequence[Buffer]]:
    """Returns a message of this kind, and the further frames. Raises `CodecError`."""
    header = as_bytes_view(frames[0])
    if header.nbytes > MAX_HEADER_BYTES:
        raise CodecError(f"a header of {header.nbytes} bytes; at most {MAX_HEADER_BYTES}")
    limits = {"max_array_len": MAX_RECORDS, "max_map_len": 0, "max_ext_len": 0, "max_bin_len": 0}
    return typed(unpacked(header, "the header", CodecError, **limits), kind, "a message", CodecError), frames[1:]


def take_batch(records: deque[Framed]) -> tuple[list[Head], list[Buffer]]:
    """Takes the records of one message from the left."""
    heads, taken, size = list[Head](), list[Buffer](), 0
    while records and len(heads) < RECORDS_AT_ONCE and size < BYTES_AT_ONCE:
        head, frames = records[0]
        if heads and len(taken) + len(frames) > MAX_FRAMES:
            break
        records.popleft()
        heads.append(head)
        taken += frames
        size += size_of(frames)
    return heads, taken


def with_frames(heads: Sequence[Head], frames: Sequence[Buffer]) -> list[Framed]:
    """Returns the heads with their frames. Raises `CodecError` if there are more or fewer."""
    ends = [0]
    for head in heads:
        ends.append(ends[-1] + head.frames)
    if ends[-1] != len(frames):
        raise CodecError(f"the heads describe {ends[-1]} frames, {len(frames)} are present")
    return [(head, frames[begin:end]) for head, begin, end in zip(heads, ends, ends[1:], strict=False)]
