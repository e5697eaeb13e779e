"""The client's side of a connection that carries many model calls (`call_frames`): one for each server.

Where a server does not take one, as an older one or a proxy, its calls are POSTs, and it is asked again after some time. A
connection with an older token ends after its last answer, and calls go on by a new one.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import cast

from counterpoint.inference.base import InferenceError
from counterpoint.inference.call_frames import (
    ABORT,
    CALL,
    CALLS_PATH,
    LAST_NUMBER,
    MOST_ANSWER_BYTES,
    MOST_BYTES_HEADER,
    MOST_CALLS,
    UPGRADE,
    FrameSender,
    FrameSplitter,
    MalformedFrames,
)
from counterpoint.inference.clients.binary_http import (
    HEAD_BYTES,
    Answer,
    BinaryHttpClient,
    Cuttable,
    MalformedAnswer,
    give,
)
from counterpoint.inference.clients.lost_peers import notice_loss
from counterpoint.inference.per_tick_limiter import PerTickLimiter

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 30.0
"""How long a server that does not take a connection of many calls is asked by POSTs alone."""

_TAKEN = re.compile(rb"HTTP/1\.1 101 .*\r\nupgrade: *" + UPGRADE.encode() + rb" *\r\n", re.IGNORECASE | re.DOTALL)
_MOST_BYTES = re.compile(rb"\r\n" + MOST_BYTES_HEADER.encode() + rb": *(\d{1,18}) *\r\n", re.IGNORECASE)


class ManyCalls:
    """Makes calls of the server that `http` asks, `limiter` of them answered in one tick of the loop."""

    def __init__(self, http: BinaryHttpClient, limiter: PerTickLimiter) -> None:
        self._http = http
        self._limiter = limiter
        self._connection: _SharedConnection | None = None
        self._headers: Mapping[str, str] | None = None
        """The headers with which it was asked for."""
        self._opening: asyncio.Task[_SharedConnection | Exception | None] | None = None
        self._not_before = 0.0
        """The loop's time before which it is not asked for again."""
        self._said = False
        """Whether the log says that the server does not take one."""

    async def post(self, path: str, body: bytes, content_type: str) -> bytes | memoryview:
        """Does as `BinaryHttpClient.post`, of a call with a small answer. Cancelling aborts the call at the server."""
        return await self._http.answered(path, self._ask(path, body, content_type))

    async def _ask(self, path: str, body: bytes, content_type: str) -> Answer:
        """Makes a call; one that is not answered since the connection ends is made once more, by a new one."""
        connection, is_new = self._usable(), False
        while True:
            if connection is None:
                connection, is_new = await self._opened(), True
            if connection is None or not connection.takes(body):
                return await self._http.posted(path, body, content_type)
            number, answer = connection.begin(body)
            try:
                return await answer
            except OSError:
                if is_new or self._http.closed:
                    raise
            finally:
                connection.end(number)
            connection = None

    def _usable(self) -> _SharedConnection | None:
        connection = self._connection
        if connection is not None and not (connection.usable and self._headers is self._http.headers()):
            connection.retire()
            connection = self._connection = None
        return connection

    async def _opened(self) -> _SharedConnection | None:
        """Returns a connection, opened once for all who wait for it; None if the server takes none. Raises as `connect`."""
        if (connection := self._usable()) is not None:
            return connection
        if asyncio.get_running_loop().time() < self._not_before:
            return None
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name=f"connection of many calls to {self._http.url}")
        await asyncio.wait([opening := self._opening])  # it goes on if this caller is cancelled
        if opening.cancelled():
            raise ConnectionResetError("the client is closed")
        if isinstance(found := opening.result(), Exception):
            raise copy(found)  # each caller has a traceback of its own
        return found

    async def _open(self) -> _SharedConnection | Exception | None:
        loop, headers = asyncio.get_running_loop(), self._http.headers()
        try:
            connection = await self._http.connect(partial(_SharedConnection, self._limiter))
            try:
                async with asyncio.timeout(self._http.connect_timeout_seconds):
                    refusal = await connection.asked(self._http.beginning("GET", CALLS_PATH, ""))
            except OSError as error:  # a time-out is one
                refusal = str(error) or type(error).__name__
            if refusal is None:
                self._connection, self._headers = connection, headers
                return connection
            connection.abort()
            if self._http.closed:
                return ConnectionResetError(refusal)
        except (OSError, InferenceError) as error:
            return error
        finally:
            self._opening = None
        self._not_before = loop.time() + AGAIN_SECONDS
        if not self._said:
            self._said = True
            logger.info(
                "%s takes no connection that carries many calls (%s): each call has one of its own",
                self._http.url,
                refusal,
            )
        return None

    def close(self) -> None:
        """Cuts the connection; calls in progress fail."""
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._connection.abort()


class _SharedConnection(Cuttable, asyncio.Protocol):
    """One connection, from its request on. The loop calls the methods that its base has."""

    def __init__(self, limiter: PerTickLimiter, on_lost: Callable[[Cuttable], None]) -> None:
        self._limiter = limiter
        self._on_lost = on_lost
        self._taken: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """None once the server takes it, else why it does not."""
        self._head = bytearray()
        self._splitter: FrameSplitter | None = None
        self._most_bytes = 0
        self._number = 0
        """The number of the last call."""
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._aborted: set[int] = set()
        """Numbers that the server has yet to answer, which nobody waits for."""
        self._given_later = 0
        """Answers that are given in later ticks. Meanwhile nothing is read."""
        self._retired = False

    async def asked(self, beginning: str) -> str | None:
        """Asks the server to take it; returns None if it does, else why not. Raises `OSError`."""
        self._transport.write(f"{beginning}Connection: Upgrade\r\nUpgrade: {UPGRADE}\r\n\r\n".encode("latin-1"))
        return await self._taken

    @property
    def usable(self) -> bool:
        """Whether another call can be made."""
        return not self._transport.is_closing() and self._number < LAST_NUMBER

    def takes(self, request: bytes) -> bool:
        """Whether the server takes the call beside those that it has."""
        return len(self._calls) + len(self._aborted) < MOST_CALLS and len(request) <= self._most_bytes

    def begin(self, request: bytes) -> tuple[int, asyncio.Future[Answer]]:
        """Makes a call; returns its number, for `end`, and its answer. That raises `OSError` or `MalformedAnswer`."""
        self._number = number = self._number + 1
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._fail(ConnectionResetError, "the connection has ended")
        self._sender.send(number, CALL, request)
        return number, answer

    def end(self, number: int) -> None:
        """Aborts the call at the server if it has not answered."""
        if self._calls.pop(number, None) is not None:
            self._aborted.add(number)
            self._sender.send(number, ABORT)

    def retire(self) -> None:
        """Closes the connection once every call is answered."""
        self._retired = True
        if not (self._calls or self._aborted):
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._sender = FrameSender(self._transport)
        notice_loss(transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self)
        self._fail(ConnectionResetError, str(exc) if exc else "the server closed the connection")

    def data_received(self, data: bytes) -> None:
        try:
            if self._splitter is None and (data := self._after_head(data)) == b"":
                return
            assert self._splitter is not None
            for number, status, body in self._splitter.split(data):
                self._on_answer(number, status, body)
        except MalformedFrames as error:
            self._fail(MalformedAnswer, str(error))
            self._transport.abort()
            return
        if self._given_later:
            self._transport.pause_reading()
        elif self._retired:
            self.retire()

    def _after_head(self, data: bytes) -> bytes:
        """Reads the head of the answer to the request; returns what comes after it."""
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        lines = bytes(head + b"\r\n")
        if end and _TAKEN.match(lines) and (most := _MOST_BYTES.search(lines)):
            self._most_bytes = int(most[1])
            self._splitter, self._head = FrameSplitter(MOST_ANSWER_BYTES), bytearray()
            self._tell(None)
            return bytes(rest)
        if end or len(head) > HEAD_BYTES:
            status_line, _, _ = head[:80].partition(b"\r\n")
            self._tell(f"it answers {bytes(status_line)!r}")
            self._transport.abort()
        return b""

    def _on_answer(self, number: int, status: int, body: bytes) -> None:
        answer = self._calls.pop(number, None)
        if answer is None:
            if number not in self._aborted:
                raise MalformedFrames(f"answers call {number}, which was not made or has its answer")
            self._aborted.remove(number)
        elif self._limiter.take():
            give(answer, (status, body))
        else:
            self._given_later += 1
            self._limiter.wait(partial(self._give_later, answer, (status, body)))

    def _give_later(self, answer: asyncio.Future[Answer], value: Answer) -> None:
        give(answer, value)
        self._given_later -= 1
        if self._given_later or self._transport.is_closing():
            return
        self._transport.resume_reading()
        if self._retired:
            self.retire()

    def _tell(self, refusal: str | None) -> None:
        if not self._taken.done():
            self._taken.set_result(refusal)

    def _fail(self, kind: Callable[[str], Exception], reason: str) -> None:
        self._tell(reason)
        calls, self._calls = self._calls, {}
        self._aborted.clear()
        for answer in calls.values():
            if not answer.done():
                answer.set_exception(kind(reason))
