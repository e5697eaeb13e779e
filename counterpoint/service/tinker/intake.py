"""The bodies of requests, read in one place: bounded for each key and for all, and counted before they become objects.

A body of some KB may unpack to any size, and some MB of lists are GB as objects. So a request takes room (`transport/room.py`)
before its body is read, and again for the unpacked body. A thread unpacks, counts and parses large bodies, a few at a time.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec
from aiohttp import web

from counterpoint.environments.gateway.json_body import count_values
from counterpoint.service.tinker import futures
from counterpoint.service.tinker.datums import tokens_of
from counterpoint.service.tinker.futures import TooMany
from counterpoint.service.tinker.proto import MESSAGES, check_fields
from counterpoint.service.tinker.refusals import BadRequest, TooLarge
from counterpoint.transport.room import Room
from counterpoint.transport.typed import met

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

MAX_BODY_BYTES = 64 * 2**20
"""The bytes of a body, and of a compressed one once it is unpacked."""

WINDOW: dict[int, int] = {zstd.DecompressionParameter.window_log_max: (MAX_BODY_BYTES - 1).bit_length()}
"""How far a compressed body may look back."""

MOST_BYTES = 2**30
"""The bytes of all bodies that are being read, or become requests."""

SMALL_BYTES = 2**16
"""A body of this size is parsed on the loop, and takes no room: the number of connections bounds these."""

READ_SECONDS = 60.0
"""Seconds in which a body must arrive."""

REST = 3
"""The rest of a key, as a multiple of its computing time, if there are others: it has a quarter of a core, whatever it
sends."""

AT_ONCE = 2
"""Large bodies that are parsed at once."""

MOST_FIELDS = 2**18
"""The fields of a message, including its parts': each is an object. The SDK sends 1,024 data at once at most."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Bound:
    """The bounds of a body in JSON."""

    size: int
    values: int
    """Commas and opening brackets outside of text."""


NAMES = Bound(SMALL_BYTES, 1000)
"""The bounds of a body of names and numbers."""

RECORDS = Bound(2**20 + SMALL_BYTES, 20_000)
"""The bounds of one with metadata, which becomes a record (`store.MAX_RECORD_BYTES`), or with a loss's graph."""

RESULTS = Bound(8 * 2**20, futures.MOST_RESULTS + 1000)
"""The bounds of one with the names of results that a client has."""

TOKENS = Bound(16 * 2**20, 2**21 + 2**16)
"""The bounds of one with tokens: 256 targets for each of 8,192 places."""


@dataclass(frozen=True, slots=True)
class Message:
    """A `ForwardBackwardRequest` as its client sent it."""

    model_id: str
    seq_id: int
    body: bytes
    tokens: int
    """The most tokens that it may use."""


class Intake:
    """Reads bodies."""

    def __init__(self, *, alone: bool = True) -> None:
        """`alone`: there is one key, or none."""
        self._alone = alone
        self._room = Room(MOST_BYTES)
        self._parsing = asyncio.Semaphore(AT_ONCE)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held while a thread computes for an owner, and during the rest after it: one that asks for much delays itself."""

    @contextmanager
    def room(self, owner: str, size: int) -> Iterator[None]:
        """Takes room for `size` bytes during the block. Raises `TooMany` if there is none for this owner."""
        if size <= SMALL_BYTES:
            yield
            return
        if not self._room.take(owner, size):
            raise TooMany(f"bodies of {self._room.of(owner):,} bytes of this key are read; {size:,} more have no room")
        try:
            yield
        finally:
            self._room.give_back(owner, size)

    async def json(self, request: web.Request, owner: str, kind: type[Value], bound: Bound) -> tuple[Value, bytes]:
        """Returns the body of a request as a value of a type, and its bytes. Raises `TooLarge`, and `msgspec.MsgspecError`."""
        body = await read(request, bound.size)

        def parse() -> Value:
            if marks(body) > bound.values and (count := count_values(body)[0]) > bound.values:
                raise TooLarge(f"the body has about {count:,} values; at most {bound.values:,}")
            return msgspec.json.decode(body or b"{}", type=met(kind))

        return await self._parsed(parse, owner, len(body)), body

    @asynccontextmanager
    async def message(self, request: web.Request, owner: str, *, is_zstd: bool) -> AsyncIterator[Message]:
        """Yields a `ForwardBackwardRequest`, with room for it during the block.

        Raises `TooLarge`, `TooMany`, `BadRequest` and `DecodeError`.
        """
        body = await read(request, MAX_BODY_BYTES)
        size = unpacked_size(body) if is_zstd else 0

        def parse() -> Message | None:
            data = decompressed(body, size) if is_zstd else body
            if check_fields(data, "ForwardBackwardRequest", MOST_FIELDS) > MOST_FIELDS:
                return None  # an exception would keep its frame, which has the data
            message = MESSAGES["ForwardBackwardRequest"].FromString(data)
            return Message(message.model_id, message.seq_id, data, tokens_of(message))

        with self.room(owner, size):
            found = await self._parsed(parse, owner, max(size, len(body)))
            if found is None:
                raise TooLarge(f"the request has more than {MOST_FIELDS:,} fields; send fewer data at once")
            yield found

    async def _parsed(self, parse: Callable[[], Value], owner: str, size: int) -> Value:
        if size <= SMALL_BYTES:
            return parse()
        return await self.computed(owner, parse, self._parsing)

    async def computed(
        self, owner: str, compute: Callable[[], Value], among: AbstractAsyncContextManager[object] | None = None
    ) -> Value:
        """Returns a function's result, the only one that computes in a thread for its owner, within `among`."""
        turn, used = self._turns.setdefault(owner, asyncio.Lock()), 0.0

        def timed() -> Value:
            nonlocal used
            began = time.thread_time()
            try:
                return compute()
            finally:
                used = time.thread_time() - began

        await turn.acquire()
        try:
            async with among or nullcontext():
                return await asyncio.to_thread(timed)
        finally:
            asyncio.get_running_loop().call_later(0 if self._alone else REST * used, turn.release)


def claimed(request: web.Request) -> int:
    """Returns the most bytes that a request's body can have, before it is read. Raises `TooLarge`."""
    length = request.content_length
    if length is None:
        return MAX_BODY_BYTES if request.body_exists else 0
    if length > MAX_BODY_BYTES:
        raise _too_long(length, MAX_BODY_BYTES)
    return length


async def read(request: web.Request, most: int) -> bytes:
    """Returns the body of a request. Raises `TooLarge`, and `HTTPRequestTimeout` for one that does not arrive."""
    if (request.content_length or 0) > most:
        raise _too_long(request.content_length or 0, most)
    body = bytearray()
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > most:
                    raise _too_long(len(body), most)
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    return bytes(body)


def _too_long(size: int, most: int) -> TooLarge:
    return TooLarge(f"the body has {size:,} bytes or more; at most {most:,}")


def marks(body: bytes) -> int:
    """Returns about how many values a JSON text has, text included."""
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def unpacked_size(body: bytes) -> int:
    """Returns the number of bytes that a frame of zstd claims. Raises `BadRequest` and `TooLarge`."""
    try:
        size = zstd.get_frame_info(body).decompressed_size
    except zstd.ZstdError as error:
        raise BadRequest(f"the body is no frame of zstd: {error}") from error
    if size is None:
        raise BadRequest("the compressed body does not say how many bytes it has")
    if size > MAX_BODY_BYTES:
        raise _too_long(size, MAX_BODY_BYTES)
    return size


def decompressed(body: bytes, size: int) -> bytes:
    """Returns what was compressed, which says itself that it has `size` bytes. Raises `BadRequest`."""
    decompressor = zstd.ZstdDecompressor(options=WINDOW)
    try:
        data = decompressor.decompress(body, max_length=size + 1)
    except zstd.ZstdError as error:
        raise BadRequest(f"the body is no frame of zstd: {error}") from error
    if len(data) != size or not decompressor.eof or decompressor.unused_data:
        raise BadRequest(f"the body is no single frame of zstd that is whole and has {size:,} bytes, as it says")
    return data
