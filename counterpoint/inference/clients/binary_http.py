"""HTTP/1.1 for our own routes: one server's keep-alive connections, which read large answers into their final memory.

A general client copies a body three times before its caller has it and takes hundreds of microseconds of Python a request
(`docs/performance.md`). This one supports the exchange of our own routes only: GET or POST, answered by a status, a
`Content-Length` and that many bytes. Anything else is a failure of the server; sizes are checked before memory is allocated.
Bytes that arrive with the head, as a small answer does whole, are copied twice. Stock servers and vLLM's own routes are asked by
aiohttp (`http_sessions`).
"""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache, partial
from http import HTTPStatus
from typing import TypeVar, cast
from urllib.parse import urlsplit

import numpy as np

from counterpoint.inference.base import InferenceError, ServerFailure, ServerUnreachable
from counterpoint.inference.clients.failures import ERROR_BYTES, NOTHING_LISTENS, failure_of
from counterpoint.inference.clients.lost_peers import notice_loss
from counterpoint.inference.clients.memory import LARGE_BYTES, LargeMemory
from counterpoint.inference.per_tick_limiter import PerTickLimiter
from counterpoint.inference.wire import MAX_RESPONSE_BYTES

HEAD_BYTES = 1 << 16
"""Longest head of a response."""

FIRST_READ_BYTES = 1 << 14
"""Most bytes of a response that one call reads before its length is known. An answer that fits behind its head is read with it.
All connections may get a head in one tick, so the call must take little time."""

READ_BYTES = 1 << 19
"""Most bytes of a body that one connection reads before others read."""

READS_PER_TICK = 4
"""Such reads in one tick of the loop: 2 MB take less than a millisecond."""

IDLE_SECONDS = 4.0
"""Longest idle time after which a connection is used again. uvicorn, which serves vLLM, closes idle connections after 5 s; a
request that is sent meanwhile is lost."""

EXTENSIONS_PER_TICK = 1
"""Memory extensions in one tick: to start one in a thread and to get the GIL back takes a third of a millisecond."""

ANSWERS_PER_TICK = 4
"""Heads that are read in one tick, and further answers that are given: each caller continues at once and may take an eighth of a
millisecond."""

_OK = HTTPStatus.OK.value  # an enumeration's member is looked up by a function of Python's own, until 3.12


class TickLimits:
    """Limits what all connections do in one tick of the loop: a thousand sockets may be readable at once."""

    def __init__(self) -> None:
        self.heads = PerTickLimiter(ANSWERS_PER_TICK)
        """Heads, and with them the answers that come whole with their heads."""
        self.extensions = PerTickLimiter(EXTENSIONS_PER_TICK)
        """Limits how often memory for large bodies is extended."""
        self.reads = PerTickLimiter(READS_PER_TICK)
        """Further reads of bodies that do not come with their head."""
        self.answers = PerTickLimiter(ANSWERS_PER_TICK)
        """Answers of several reads."""


class BinaryHttpClient:
    """The connections to the server at `url`.

    As many are opened as there are calls at once; only the server, a failure or a cancelled call closes one.
    """

    def __init__(
        self,
        url: str,
        headers: Callable[[], Mapping[str, str]],
        connect_timeout_seconds: float,
        limits: TickLimits,
        threads: Executor,
        tls: Callable[[], ssl.SSLContext],
    ) -> None:
        """`headers` are those of each request, when it is made: the same object unless they have changed.

        `tls` is called for an `https` URL: to read the system's certificates takes some 10 ms.
        """
        parts = urlsplit(url)
        self.url = url
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = tls() if parts.scheme == "https" else None
        self._path = parts.path
        self._host_line = f"Host: {parts.netloc.rpartition('@')[2]}\r\n"
        self.headers = headers
        """The headers of a request that is made now."""
        self._sent_headers: Mapping[str, str] | None = None
        """The headers in `_beginnings`."""
        self._beginnings: dict[tuple[str, str], str] = {}
        """What the heads of all requests with a path and a content type have in common."""
        self.connect_timeout_seconds = connect_timeout_seconds
        self._limits = limits
        self._threads = threads
        self._scratch = memoryview(bytearray(FIRST_READ_BYTES))
        self.idle: dict[_Connection, float] = {}
        """Idle connections with the loop's time since when; the one used last is the last."""
        self._open: set[Cuttable] = set()
        self.closed = False

    async def post(self, path: str, body: bytes, content_type: str) -> bytes | memoryview:
        """Returns the body of a 200.

        Raises `ServerUnreachable`, `RequestRefused` or `ServerFailure`, and `InferenceError` if this machine has no descriptor
        for a connection or no memory for the body. Cancelling closes the connection, which ends the request at the server.
        """
        return await self.answered(path, self.posted(path, body, content_type))

    def posted(self, path: str, body: bytes, content_type: str) -> Awaitable[Answer]:
        """Does as `post`, and returns any answer."""
        head = f"{self.beginning('POST', path, content_type)}Content-Length: {len(body)}\r\n\r\n"
        return self._ask(head.encode("latin-1") + body)

    async def get(self, path: str, further_headers: Mapping[str, str]) -> bytes | memoryview:
        """Does as `post`, without a body."""
        lines = "".join([f"{name}: {value}\r\n" for name, value in further_headers.items()])
        return await self.answered(path, self._ask(f"{self.beginning('GET', path, '')}{lines}\r\n".encode("latin-1")))

    async def answered(self, path: str, asking: Awaitable[Answer]) -> bytes | memoryview:
        """Returns the body of an answer that is a 200. Raises as `post`."""
        try:
            status, answer = await asking
        except OSError as error:
            raise ServerUnreachable(f"{self.url}{path}: {str(error) or type(error).__name__}") from error
        except MalformedAnswer as error:
            raise ServerFailure(f"{self.url}{path} {error}") from error
        except MemoryError as error:  # not a failure of the server
            raise InferenceError(f"no memory for an answer of {self.url}{path}: {error}") from error
        if status != _OK:
            raise failure_of(self.url + path, status, bytes(answer))
        return answer

    def beginning(self, method: str, path: str, content_type: str) -> str:
        """Returns the head of a request up to lines of its own and the empty one."""
        headers = self.headers()
        if headers is not self._sent_headers:
            self._sent_headers, self._beginnings = headers, {}
        if (found := self._beginnings.get((path, content_type))) is None:
            own = {**headers, "Content-Type": content_type} if content_type else headers
            lines = "".join([f"{name}: {value}\r\n" for name, value in own.items()])
            found = f"{method} {self._path}{path} HTTP/1.1\r\n{self._host_line}{lines}"
            self._beginnings[path, content_type] = found
        return found

    async def _ask(self, request: bytes) -> Answer:
        """Sends the request by an idle connection, or by a new one.

        A server may close an idle connection just as it is used again, which is no failure: the request is then sent once
        more, by a new connection. All our requests may be repeated.
        """
        connection = self._take_idle()
        while True:
            is_new = connection is None
            if connection is None:
                connection = await self._connect()
            try:
                return await connection.exchange(request)
            except OSError:
                if is_new or connection.answers or self.closed:
                    raise
            finally:
                self._give_back(connection)
            connection = None

    def _take_idle(self) -> _Connection | None:
        """Returns the connection used last; None if that one must not be used again, in which case it is cut."""
        if not self.idle:
            return None
        connection, since = self.idle.popitem()
        if connection.reusable and asyncio.get_running_loop().time() - since <= IDLE_SECONDS:
            return connection
        connection.abort()
        return None

    def _give_back(self, connection: _Connection) -> None:
        """Keeps a connection for the next request; cuts it if that is not possible."""
        if connection.reusable:
            self.idle[connection] = asyncio.get_running_loop().time()
        else:
            connection.abort()

    def close(self) -> None:
        """Cuts every connection; calls in progress fail."""
        self.closed = True
        for connection in list(self._open):
            connection.abort()

    async def _connect(self) -> _Connection:
        return await self.connect(partial(_Connection, self._scratch, self._limits, self._threads))

    async def connect(self, protocol: Callable[[Callable[[Cuttable], None]], Connected]) -> Connected:
        """Opens a connection, which is cut with this client. It calls what `protocol` is made with once it is lost.

        Raises `OSError`, or `InferenceError` if this machine has no descriptor for it.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_timeout_seconds):
                _, connection = await loop.create_connection(
                    lambda: protocol(self._forget), self._host, self._port, ssl=self._ssl
                )
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no connection within {self.connect_timeout_seconds:g} s"
            if error.errno in (errno.EMFILE, errno.ENFILE):  # not a failure of the server
                raise InferenceError(f"no descriptor is left for a connection to {self.url}: {reason}") from error
            raise ConnectionError(NOTHING_LISTENS if _is_refused(error) else reason) from error
        self._open.add(connection)
        return connection

    def _forget(self, connection: Cuttable) -> None:
        self._open.discard(connection)
        if isinstance(connection, _Connection):
            self.idle.pop(connection, None)


def _is_refused(error: OSError) -> bool:
    """Whether each address refuses: of several, as `localhost` may have, the loop puts the errors into one text."""
    numbers = {*re.findall(r"\[Errno (\d+)\]", str(error))}
    return isinstance(error, ConnectionRefusedError) or numbers == {str(errno.ECONNREFUSED)}


class Cuttable(asyncio.BaseProtocol):
    """A connection's protocol that can be told to end."""

    _transport: asyncio.Transport

    def abort(self) -> None:
        """Cuts the connection."""
        self._transport.abort()


Connected = TypeVar("Connected", bound=Cuttable)

Answer = tuple[int, bytes | memoryview]
"""The status and the body of an answer."""


class MalformedAnswer(Exception):
    """The answer of the server is invalid; the message continues a sentence that begins with its URL."""


@dataclass(frozen=True, slots=True)
class _Head:
    """The needed fields of a response's head."""

    status: int
    length: int | None
    keep_alive: bool


class _Connection(Cuttable, asyncio.BufferedProtocol):
    """One connection, idle or with one exchange in progress. The loop calls its methods without an underscore."""

    def __init__(
        self, scratch: memoryview, limits: TickLimits, threads: Executor, on_lost: Callable[[Cuttable], None]
    ) -> None:
        self._scratch = scratch
        """The buffer for heads, shared by all connections: it is filled and emptied within one callback."""
        self._limits = limits
        self._threads = threads
        self._on_lost = on_lost
        self._answer: asyncio.Future[Answer] | None = None
        self.answers = False
        """Whether any byte of the answer has arrived."""
        self._head = bytearray()
        """The bytes of the head so far, and those of the body that arrived with it."""
        self._head_waits = False
        """Whether the head is read in a later tick."""
        self._lost: ConnectionResetError | None = None
        """Why there is no connection any more, for the head that still waits."""
        self._body: memoryview | None = None
        self._filled = 0
        self._ready = 0
        """Bytes of the body whose memory is mapped, and which may be filled."""
        self._memory: LargeMemory | None = None
        """The memory of a large body."""
        self._status = 0
        self._keep_alive = True
        self._paused = False

    def exchange(self, request: bytes) -> asyncio.Future[Answer]:
        """Sends `request`; returns status and body of the answer. Raises `OSError`, `MalformedAnswer` or `MemoryError`."""
        self._answer, self.answers = asyncio.get_running_loop().create_future(), False
        self._transport.write(request)
        return self._answer

    @property
    def reusable(self) -> bool:
        """Whether another exchange may follow: the last one is complete, and neither side is about to close."""
        sent = not self._transport.is_closing() and self._transport.get_write_buffer_size() == 0
        return sent and self._answer is None and self._keep_alive

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        notice_loss(transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self)
        self._lost = ConnectionResetError(str(exc) if exc else "the server closed the connection")
        if not self._head_waits:  # else what has come may be the whole answer
            self._end(self._lost)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._body is None:
            return self._scratch
        return self._body[self._filled : min(self._filled + READ_BYTES, self._ready)]

    def buffer_updated(self, nbytes: int) -> None:
        if self._answer is None:
            self._transport.abort()  # There was no request.
        elif self._body is None:
            self.answers = True
            self._head += self._scratch[:nbytes]
            if not self._head_waits and self._limits.heads.take():
                self._read_head()
                return
            if not self._head_waits:
                self._head_waits = True
                self._limits.heads.wait(self._read_head)
            if len(self._head) >= FIRST_READ_BYTES:
                # A small answer is there whole, and to pause takes two calls of the kernel.
                self._pause()
        else:
            self._advance(nbytes)

    def _read_head(self) -> None:
        self._head_waits = False
        self._resume()
        try:
            self._begin_body()
        except MalformedAnswer as error:
            self._fail(error)
        if self._lost is not None:
            self._end(self._lost)

    def _begin_body(self) -> None:
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > HEAD_BYTES:
                raise MalformedAnswer(f"sends a head of more than {HEAD_BYTES} bytes")
            return
        head = _parse(bytes(self._head[:end]))
        # The first bytes of an error suffice for a message; if there are more, the connection is cut.
        length = _body_length(head) if head.status == _OK else min(head.length or 0, ERROR_BYTES)
        self._status, self._keep_alive = head.status, head.keep_alive and length == head.length
        present, self._head = memoryview(self._head)[end + 4 :], bytearray()
        if len(present) > length and self._keep_alive:
            raise MalformedAnswer(f"sends more than the {length} bytes it announces")
        if length < LARGE_BYTES and len(present) >= length:
            answer, self._answer = self._answer, None
            # As bytes: a view would be two objects that the garbage collector visits, for as long as the turn lives.
            give(answer, (self._status, bytes(present[:length])))
        elif length < LARGE_BYTES:
            self._fill(np.empty(length, dtype=np.uint8).data, length, present[:length])
        else:
            memory = self._memory = LargeMemory(length)
            if memory.ready:
                self._fill(memory.view, memory.ready, present)
            else:
                self._extend(memory, present)

    def _extend(self, memory: LargeMemory, present: memoryview) -> None:
        """Continues reading once more of `memory` is mapped."""
        self._pause()
        if self._limits.extensions.take():
            self._begin_extension(memory, present)
        else:
            self._limits.extensions.wait(partial(self._begin_extension, memory, present))

    def _begin_extension(self, memory: LargeMemory, present: memoryview) -> None:
        if self._transport.is_closing():
            return
        extension = asyncio.get_running_loop().run_in_executor(self._threads, memory.extend)
        extension.add_done_callback(partial(self._on_extended, memory, present))

    def _on_extended(self, memory: LargeMemory, present: memoryview, extension: asyncio.Future[None]) -> None:
        if self._transport.is_closing() or extension.cancelled():
            return
        error = extension.exception()
        if error is None:
            self._fill(memory.view, memory.ready, present)
        else:
            self._keep_alive = False
            self._fail(error)

    def _fill(self, body: memoryview, ready: int, present: memoryview) -> None:
        """Continues reading into `body`, up to `ready`, after `present`, which arrived with the head."""
        self._body, self._ready = body, ready
        self._body[self._filled : self._filled + len(present)] = present
        self._resume()
        self._advance(len(present))

    def _advance(self, nbytes: int) -> None:
        assert self._body is not None
        self._filled += nbytes
        if self._filled < len(self._body):
            if self._filled == self._ready and self._memory is not None:
                self._extend(self._memory, memoryview(b""))
            elif not self._limits.reads.take():
                self._pause()
                self._limits.reads.wait(self._resume)
            return
        answer, body = self._answer, self._body
        self._answer, self._body, self._memory, self._filled = None, None, None, 0
        if self._limits.answers.take():
            give(answer, (self._status, body))
        else:
            self._limits.answers.wait(partial(give, answer, (self._status, body)))

    def _pause(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def _resume(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def _end(self, error: ConnectionResetError) -> None:
        self._fail(error)
        # The error's traceback refers to this connection: without these there is no cycle that holds the memory.
        self._answer = self._body = self._memory = self._lost = None

    def _fail(self, error: BaseException) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def give(answer: asyncio.Future[Answer] | None, value: Answer) -> None:
    """Answers a call, unless its caller was cancelled."""
    assert answer is not None
    if not answer.done():
        answer.set_result(value)


@lru_cache(maxsize=64)
def _parse(head: bytes) -> _Head:
    """Reads a head, without the empty line that ends it; most heads of small answers are alike. Raises `MalformedAnswer`."""
    status_line, *lines = head.split(b"\r\n")
    version, _, rest = status_line.partition(b" ")
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not (rest[:3].isdigit() and rest[3:4] in (b"", b" ")):
        raise MalformedAnswer(f"does not answer in HTTP/1.1: {status_line[:80]!r}")
    fields: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        name, value = name.lower(), value.strip()
        contradicts = fields.setdefault(name, value) != value and name == b"content-length"
        if not colon or not name or contradicts:
            raise MalformedAnswer(f"answers with a header that is none or contradicts another: {line[:80]!r}")
    if b"transfer-encoding" in fields or b"content-encoding" in fields:
        return _Head(int(rest[:3]), None, False)
    announced = fields.get(b"content-length")
    if announced is not None and not (announced.isdigit() and len(announced) < 20):
        raise MalformedAnswer(f"announces a length of {announced[:80]!r} bytes")
    keep_alive = version == b"HTTP/1.1" and fields.get(b"connection", b"").lower() != b"close"
    return _Head(int(rest[:3]), None if announced is None else int(announced), keep_alive)


def _body_length(head: _Head) -> int:
    """Returns the bytes of the body of a 200. Raises `MalformedAnswer`."""
    if head.length is None:
        raise MalformedAnswer(
            "answers without a Content-Length, chunked or compressed; does something in between rewrite answers?"
        )
    if head.length > MAX_RESPONSE_BYTES:
        raise MalformedAnswer(f"announces {head.length} bytes; at most {MAX_RESPONSE_BYTES} are read")
    return head.length
