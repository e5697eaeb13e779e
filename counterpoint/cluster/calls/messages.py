"""The messages between a caller and a server of calls: `[kind, header, value...]`, with a value's frames by `codec.py`.

A caller says HELLO when it has connected, and gets METHODS. Each CALL gets one RESULT, RAISED, REFUSED or BUSY, by its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgpack
import msgspec
from msgspec import Meta

from counterpoint.transport.arrays import CodecError
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.typed import typed
from counterpoint.transport.unpacked import shown, unpacked

HELLO, METHODS = b"HELLO", b"METHODS"
CALL, RESULT, RAISED, REFUSED, BUSY = b"CALL", b"RESULT", b"RAISED", b"REFUSED", b"BUSY"

MAX_HEADER_BYTES = 2**17
"""Longest header: a traceback, or the methods of a class."""

LONGEST_MESSAGE, LONGEST_TRACEBACK = 2_000, 16_000
"""Characters of an exception that travel: the beginning of its message, the end of its traceback."""


Name = Annotated[str, Meta(max_length=256)]
Natural = Annotated[int, Meta(ge=0)]


class CallHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The header of a CALL."""

    caller: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Random; with the number, it names the call, also when it is sent again."""
    number: Natural
    worker: Name
    incarnation: int
    """The worker that is meant; another one refuses."""
    method: Name
    seconds: Annotated[float, Meta(ge=0)]
    """How long the caller will wait; a call that was not begun by then is dropped."""

    def pack(self) -> bytes:
        """Returns it as bytes."""
        return pack(*msgspec.structs.astuple(self))

    @classmethod
    def unpack(cls, header: Buffer) -> CallHeader:
        """Returns the header of these bytes. Raises `CodecError` for anything else."""
        return typed(unpack(header), cls, "the header of a call", CodecError)


def pack(*values: object) -> bytes:
    """Returns a header."""
    packed: bytes = msgpack.packb(values)
    return packed


def unpack(header: Buffer) -> list[object]:
    """Returns the values of a header. Raises `CodecError` for anything else."""
    data = as_bytes_view(header)
    if data.nbytes > MAX_HEADER_BYTES:
        raise CodecError(f"a header of {data.nbytes} bytes; at most {MAX_HEADER_BYTES} travel")
    values = unpacked(data, "the header", CodecError, max_array_len=8, max_map_len=2048, max_ext_len=0)
    if not isinstance(values, list):
        raise CodecError(f"{shown(values)} is no header")
    return values


def methods_message(worker: str, incarnation: int, idempotent: Mapping[str, bool]) -> list[Buffer]:
    """Returns the METHODS of a worker: whether each is idempotent."""
    return [METHODS, pack(worker, incarnation, dict(idempotent))]


def read_methods(frames: Sequence[Buffer]) -> tuple[str, int, dict[str, bool]]:
    """Returns worker, incarnation and methods of METHODS. Raises `CodecError` for anything else."""
    match unpack(frames[1]) if len(frames) == 2 else None:
        case [str(worker), int(incarnation), dict(methods)] if all(
            type(name) is str and type(idempotent) is bool for name, idempotent in methods.items()
        ):
            return worker, incarnation, methods
        case other:
            raise CodecError(f"{shown(other)} are no methods")


def read_number(frames: Sequence[Buffer]) -> tuple[int, list[object]]:
    """Returns the number of an answer, and what else its header holds. Raises `CodecError` for anything else."""
    match unpack(frames[1]) if len(frames) >= 2 else None:
        case [int(number), *others]:
            return number, others
        case other:
            raise CodecError(f"{shown(other)} is no header of an answer")
