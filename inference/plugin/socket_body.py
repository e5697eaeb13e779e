"""A request's body that a thread moves from its socket into files, past the API server's event loop and HTTP parser.

uvicorn copies a body four times, in pieces of 64 KiB, on the loop that answers model calls. Here the kernel moves it: from the
socket into a pipe, by reference, and from there into the file. The parser does not see the body's end then, so the connection is
closed after the answer.

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

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from transport.files.atomic import write_buffers

PIPE_BYTES = 1 << 20
"""The most that a process may have in a pipe without privileges, by default."""

_EXTENSION = "counterpoint.connection"


class Connection(HttpToolsProtocol):
    """uvicorn's side of a connection. Its requests' scopes name it, so that a route can take its socket."""

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
        if self.transport.is_closing() or self.cycle.disconnected:
            raise ConnectionAbortedError("the client has hung up")
        if self.pipeline:
            raise ConnectionAbortedError(
                "the client sent another request before the answer of this one; expected one at a time"
            )
        self.flow.pause_reading()
        self.cycle.keep_alive = False
        came, self.cycle.body = bytes(self.cycle.body), bytearray()
        return came, socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))


def connection_of(scope: Any) -> Connection | None:
    """Returns the connection of an ASGI request; None in a server that was started without `Connection`."""
    found: Connection | None = scope.get("extensions", {}).get(_EXTENSION, {}).get("connection")
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
