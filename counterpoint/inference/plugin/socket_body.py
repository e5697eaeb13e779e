"""The API server's connections: bounds of what a stranger may send, and bodies that a thread moves from a socket into files.

vLLM's bounds of a head hold with another parser of uvicorn's, and uvicorn has no deadline for one. `BoundedConnection` has
both, before anything is asked of a request.

A body goes past the event loop and the parser: uvicorn copies a body four times, in pieces of 64 KiB, on the loop that answers
model calls. Here the kernel moves it: from the socket into a pipe, by reference, and from there into the file. The parser does
not see the body's end then, so the connection is closed after the answer.

Not under TLS, whose bytes only the transport can read, and not for a body of unknown length: these come by ASGI, as all others.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from counterpoint.transport.files.atomic import write_buffers

PIPE_BYTES = 1 << 20
"""The most that a process may have in a pipe without privileges, by default."""

HEAD_BYTES = 1 << 16
"""The most of a head, and of anything else that is no body: of trailers, say."""

HEAD_SECONDS = 30.0
"""Longest time from the connection, or from the end of an answer, until the next request's head is complete."""

BODY_SECONDS = 60.0
"""Longest time without a byte of a body that is read, or of an answer that the client takes."""

GRACE_SECONDS = 1.0
"""A connection that is late is looked at once more after this: the whole process may have been stopped."""

_EXTENSION = "counterpoint.connection"


class _TooLarge(Exception):
    """A head that came at once has too many bytes."""


class _Answer:
    """Takes the place of a cycle's transport: sends the head of an answer together with the first piece of its body.

    uvicorn writes the two one after the other: each is a call of the kernel, and wakes a client that waits for the other. A
    head whose body does not follow at once is sent alone in the loop's next turn, and that of an answer to HEAD, which has none,
    at once.
    """

    def __init__(self, connection: BoundedConnection) -> None:
        self._connection = connection
        self._cycle: RequestResponseCycle | None = connection.cycle
        """Until its answer begins: the two would be garbage for the collector after it."""
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        """Sends what a cycle writes: the head of its answer first, unless it asks for a body before."""
        if self._cycle is not None and self._cycle.response_started:
            self._head, is_all = data, self._cycle.scope["method"] == "HEAD"
            self._cycle = None
            if is_all:
                self._send_head()
            else:
                self._connection.loop.call_soon(self._send_head)
        elif (head := self._head) is not None:
            self._head = None
            self._connection.transport.writelines([head, data])
        else:
            self._connection.transport.write(data)

    def is_closing(self) -> bool:
        """Whether the connection is closed, or about to be."""
        return self._connection.transport.is_closing()

    def close(self) -> None:
        """Closes the connection, after what was written."""
        self._send_head()
        self._connection.transport.close()

    def _send_head(self) -> None:
        if (head := self._head) is not None and not self._connection.transport.is_closing():
            self._head = None
            self._connection.transport.write(head)


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's side of a connection, within bounds. Its requests' scopes name it, so that a route can take its socket."""

    _unparsed = 0
    """Bytes since the last whole head, piece of a body, or end of one."""
    _since = 0.0
    """The time when the wait for the client began."""
    _unsent = 0
    """Bytes of answers that the kernel had not taken at the last look."""
    _late = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        """Begins to wait for a head."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the connection."""
        self._stop_looking()
        super().connection_lost(exc)

    def hand_over(self, to: asyncio.Protocol, head: bytes) -> None:
        """Answers the request by `head`, an answer 101; what comes from then on is the other protocol's.

        Nothing else of an answer is sent. Raises `ConnectionAbortedError` as `take`, and if the request has a body.
        """
        self._check_alone()
        if self.cycle.more_body or self.cycle.body:
            raise ConnectionAbortedError("a request for an upgrade has no body")
        self._stop_looking()
        self.cycle.disconnected = True
        self.connections.discard(self)
        self.transport.write(head)
        self.transport.set_protocol(to)
        to.connection_made(self.transport)
        self.flow.resume_reading()

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing: a route answers the request, as one for another upgrade, which HTTP has a server ignore."""

    def handle_websocket_upgrade(self) -> None:
        """Hands the connection over to another protocol."""
        self._stop_looking()
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        """Parses what has come, unless it is too much."""
        if self.transport.is_closing():
            return
        self._unparsed += len(data)
        if self._answers and self.cycle.more_body:
            self._since = self.loop.time()
        super().data_received(data)
        if self._unparsed > HEAD_BYTES:
            self._refuse()

    def on_headers_complete(self) -> None:
        """Begins to answer a request."""
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES:
            self._refuse()
            raise _TooLarge  # the parser stops
        self._unparsed = 0
        self._since = self.loop.time()
        former = self.cycle
        super().on_headers_complete()
        if self.cycle is not former:
            self.cycle.transport = _Answer(self)  # type: ignore[assignment] # it has what a cycle calls

    def on_body(self, body: bytes) -> None:
        """Takes a piece of a body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends a request's body."""
        self._unparsed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Begins to wait for the next head."""
        super().on_response_complete()
        self._since = self.loop.time()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP."""
        if not self.transport.is_closing():
            super().send_400_response(msg)

    @property
    def _answers(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self) -> None:
        if self._answers:
            self.transport.abort()  # another answer has begun
        elif not self.transport.is_closing():
            said = f"the head of a request has at most {HEAD_BYTES} bytes".encode()
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(head % len(said) + said)
            self.transport.close()

    def _look(self) -> None:
        """Ends the connection if its client is late; else looks again when it may be."""
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        if unsent != self._unsent:  # it takes an answer, which may be long, and its next head is due after that
            self._unsent, self._since = unsent, now
        if unsent:
            left = self._since + BODY_SECONDS - now
        elif not self._answers:
            left = self._since + HEAD_SECONDS - now
        elif self.cycle.more_body and not (self.flow.read_paused or self.cycle.waiting_for_100_continue):
            left = self._since + BODY_SECONDS - now
        else:  # nothing is awaited of it
            self._since, left = now, HEAD_SECONDS
        if left <= 0 and self._late:
            self.transport.abort()
            return
        self._late = left <= 0
        self._timer = self.loop.call_later(GRACE_SECONDS if self._late else left, self._look)

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def on_message_begin(self) -> None:
        """Begins a request."""
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: {"connection": self}}

    @property
    def body_bytes(self) -> int | None:
        """Length of the request's body; None if its bytes are not those of the socket."""
        lengths = [int(value) for name, value in self.headers if name == b"content-length"]
        return lengths[0] if lengths and self.scheme == "http" else None

    def take(self) -> tuple[bytes, socket.socket]:
        """Returns what has come of the body and was not handed on, and a socket that brings the rest. The loop reads no more.

        Raises `ConnectionAbortedError` if the client has hung up, or has sent another request, whose body this would be.
        """
        self._check_alone()
        self.flow.pause_reading()
        self.cycle.keep_alive = False
        came, self.cycle.body = bytes(self.cycle.body), bytearray()
        return came, socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))

    def _check_alone(self) -> None:
        if self.transport.is_closing() or self.cycle.disconnected:
            raise ConnectionAbortedError("the client has hung up")
        if self.pipeline:
            raise ConnectionAbortedError(
                "the client sent another request before the answer of this one; expected one at a time"
            )


def connection_of(scope: Any) -> BoundedConnection | None:
    """Returns the connection of an ASGI request; None in a server that was started without `BoundedConnection`."""
    found: BoundedConnection | None = scope.get("extensions", {}).get(_EXTENSION, {}).get("connection")
    return found


class SocketBody:
    """The rest of a body: `came`, and what `connection` brings. `silent_seconds`: how long it may bring nothing."""

    def __init__(self, came: bytes, connection: socket.socket, silent_seconds: float) -> None:
        self._came = memoryview(came)
        self._connection = connection
        self._silent_seconds = silent_seconds
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)
        self._thread = ThreadPoolExecutor(1, "weights")
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Makes the pipe."""
        with self._open as opening:
            opening.enter_context(self._connection)
            opening.callback(self._thread.shutdown)
            reading, writing = os.pipe()
            self._out = opening.enter_context(open(reading, "rb", buffering=0))
            self._in = opening.enter_context(open(writing, "wb", buffering=0))
            with suppress(PermissionError):  # many pipes are open: this one stays small
                fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes pipe and socket. The client is not told: its connection is the server's, which answers it."""
        self._open.close()

    async def write(self, path: Path, nbytes: int) -> None:
        """Writes the next `nbytes` to a new file, in a thread.

        Raises `ConnectionAbortedError` if there are fewer, `TimeoutError` when the client is silent, `OSError` of the file.
        """
        writing = asyncio.get_running_loop().run_in_executor(self._thread, self._write, path, nbytes)
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            with suppress(OSError):  # the client has hung up
                self._connection.shutdown(socket.SHUT_RDWR)
            await asyncio.wait([writing])
            raise

    def _write(self, path: Path, nbytes: int) -> None:
        with path.open("xb", buffering=0) as file:
            piece, self._came = self._came[:nbytes], self._came[nbytes:]
            write_buffers(file.fileno(), [piece])
            left = nbytes - len(piece)
            while left:
                held = self._piped(min(left, PIPE_BYTES))
                if not held:
                    raise ConnectionAbortedError(f"the body ends {left} bytes before the end of {path.name}")
                left -= held
                _empty(self._out, file, held)

    def _piped(self, most: int) -> int:
        """Moves the next bytes into the pipe, which is empty; returns how many, 0 at the end of what the client sent."""
        while True:
            try:
                return os.splice(self._connection.fileno(), self._in.fileno(), most)
            except BlockingIOError:
                if not self._arrivals.poll(1000 * self._silent_seconds):
                    raise TimeoutError(f"the client sent nothing for {self._silent_seconds:g} s") from None


def _empty(pipe: BinaryIO, file: BinaryIO, nbytes: int) -> None:
    """Moves all `nbytes` of a pipe to the end of a file; copies them where its file system takes none from a pipe."""
    try:
        while nbytes:
            nbytes -= os.splice(pipe.fileno(), file.fileno(), nbytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        write_buffers(file.fileno(), [pipe.read(nbytes)])
