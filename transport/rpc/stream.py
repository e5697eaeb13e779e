"""A link over a UNIX socket of this user. Large frames are read straight into their place.

A message is the number of its frames in four bytes, the size of each in eight, and then the frames. The kernel tells at once that
the other process has ended. That it was stopped (SIGSTOP) its state says: one that computes and answers nothing is not silent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.frames import BadFrame
from counterpoint.transport.rpc.connection import (
    MOST_BYTES,
    MOST_CLIENTS,
    MOST_FRAMES,
    Connection,
    OpenAsks,
    PeerAsk,
    ask_frame,
    most_together,
    read_answer,
)

_COUNT = struct.Struct("<I")
_SCRATCH_BYTES = 2**16
"""What is received at once; longer frames get a place of their own."""

_JOINED_BYTES = 2**16
"""Messages up to this size are copied into one piece, which costs less than several."""

_KERNEL_BYTES = 2**20
"""What the kernel is asked to hold of a message: with its usual 208 KiB both ends wait for each other forty times for 8 MB."""

_MOST_UNREAD_BYTES = 2**25
"""A client is not read while so much waits for it. With less, its next ask waits until the answer to another has left."""

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid, gid."""

_LINGER_SECONDS = 0.5

OnAsk = Callable[[PeerAsk], object]
Admit = Callable[[Connection, socket.socket], bool]

logger = logging.getLogger(__name__)


class StreamReader:
    """Cuts messages out of what is received: `buffer` says where the next bytes go, `take` returns what they complete. Pure."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = self._end = 0
        self._own: memoryview | None = None
        """The place of a long frame, of which `_end` bytes are there."""
        self._frames: list[Buffer] = []
        """The pieces of the message that are there."""
        self._pieces = [_COUNT.size]
        """The sizes of the pieces of the message that are known and still to come, the next one last."""

    def buffer(self) -> memoryview:
        """Returns where to put what is received next; at least one byte."""
        return (self._scratch if self._own is None else self._own)[self._end :]

    def take(self, count: int) -> list[list[Buffer]]:
        """Returns the messages that so many bytes more complete. Raises `BadFrame`."""
        self._end += count
        messages: list[list[Buffer]] = []
        if self._own is not None:
            if self._end < self._own.nbytes:
                return messages
            whole, self._own, self._end = self._own, None, 0
            self._add(whole, messages)
        while (have := self._end - self._start) >= self._pieces[-1]:
            begin, self._start = self._start, self._start + self._pieces[-1]
            self._add(bytes(self._scratch[begin : self._start]), messages)
        rest, size = self._scratch[self._start : self._end], self._pieces[-1]
        if size > _SCRATCH_BYTES:
            try:
                self._own = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]  # takes memory as it is filled
            except MemoryError:
                raise BadFrame(f"there is no memory for a frame of {size} bytes") from None
            self._own[:have] = rest
        else:
            self._scratch[:have] = rest
        self._start, self._end = 0, have
        return messages

    def _add(self, piece: bytes | memoryview, messages: list[list[Buffer]]) -> None:
        self._pieces.pop()
        self._frames.append(piece)
        if len(self._frames) == 1:
            (count,) = _COUNT.unpack(piece)
            if not 1 <= count <= MOST_FRAMES:
                raise BadFrame(f"a message of {count} frames; 1 to {MOST_FRAMES} travel")
            self._pieces.append(8 * count)
        elif len(self._frames) == 2:
            self._pieces = [size for (size,) in struct.iter_unpack("<Q", piece)][::-1]
            largest, whole = max(self._pieces), sum(self._pieces)
            together = most_together(self._most_bytes)
            if largest > self._most_bytes or whole > together:
                said = f"frames of {largest} bytes, and of {whole} together, are announced"
                raise BadFrame(f"{said}; at most {self._most_bytes} are read, and {together} together")
        elif not self._pieces:
            messages.append(self._frames[2:])
            self._frames, self._pieces = [], [_COUNT.size]


def framed(frames: Sequence[Buffer]) -> list[bytes | memoryview]:
    """Returns a message as pieces to write one after the other: one piece if it is short."""
    views = [as_bytes_view(frame) for frame in frames]
    sizes = [view.nbytes for view in views]
    head = _COUNT.pack(len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    return (
        [b"".join([head, *views])] if sum(sizes) <= _JOINED_BYTES else [head, *(view for view in views if view.nbytes)]
    )


class StreamLink(asyncio.BufferedProtocol):
    """A `PeerLink` over an asyncio transport."""

    def __init__(self, connection: Connection, most_bytes: int, admit: Admit | None = None) -> None:
        self._connection, self._admit = connection, admit
        self._reader = StreamReader(most_bytes)
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport, self._connection.link = cast(asyncio.Transport, transport), self
        self._transport.set_write_buffer_limits(_MOST_UNREAD_BYTES, _MOST_UNREAD_BYTES // 2)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BYTES)
        if self._admit is not None and not self._admit(self._connection, transport.get_extra_info("socket")):
            self._connection.close("it may not connect")

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio."""
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        try:
            messages = self._reader.take(nbytes)
        except BadFrame as error:
            logger.warning("%s sent what is no message: %s", self._connection.name, error)
            self._connection.close(f"it sent what is no message: {error}")
            return
        for message in messages:
            self._connection.received(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._connection.close(f"its connection broke{f': {exc}' if exc else ''}")

    def pause_writing(self) -> None:
        """See asyncio: who does not read is not read, so what waits for it is bounded by what it has asked."""
        if self._admit is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """See asyncio."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def send(self, frames: Sequence[Buffer]) -> None:
        """See `PeerLink`."""
        if not self._transport.is_closing():
            self._transport.writelines(framed(frames))

    def close(self) -> None:
        """See `PeerLink`: what was sent has a moment to be read."""
        self._transport.close()
        asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._transport.abort)


async def connect_unix(
    path: str, name: str, heartbeat_seconds: float, most_bytes: int = MOST_BYTES, most_asks: int = sys.maxsize
) -> Connection:
    """Connects to `name` at a UNIX socket; the connection ends if its process is found stopped at two heartbeats.

    `most_asks` and `most_bytes` are those of its listener. Raises `OSError`.
    """
    connection, loop = Connection(name, None, most_asks, most_bytes), asyncio.get_running_loop()
    transport, _ = await loop.create_unix_connection(lambda: StreamLink(connection, most_bytes), path)
    watch = loop.create_task(_watch(connection, _peer(transport.get_extra_info("socket"))[0], heartbeat_seconds))
    connection.ended.add_done_callback(lambda _: watch.cancel())
    return connection


def ask_once(path: str, frames: Sequence[Buffer], seconds: float, most_bytes: int = MOST_BYTES) -> list[Buffer]:
    """Asks one thing at a UNIX socket, and blocks until the answer.

    Raises `RpcError`; `OSError` if nothing answers, also not within `seconds`; `ValueError` for an answer that is none.
    """
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(seconds)
        end.connect(path)
        end.sendall(b"".join(framed([ask_frame(1, seconds), *frames])))
        reader = StreamReader(most_bytes)
        while count := end.recv_into(reader.buffer()):
            for message in reader.take(count):
                return read_answer(message)
    raise ConnectionResetError("the connection ended before the answer")


class UnixListener:
    """Answers processes of this user, and of root, at a path. The path stays at the end: it may be a successor's by then."""

    def __init__(
        self, on_ask: OnAsk, most_asks: int, most_bytes: int = MOST_BYTES, most_clients: int = MOST_CLIENTS
    ) -> None:
        self._on_ask, self._most_asks = on_ask, most_asks
        self._most_bytes, self._most_clients = most_bytes, most_clients
        self._load = OpenAsks(most_clients * most_asks, 4 * most_together(most_bytes))
        self._clients: dict[Connection, None] = {}
        """The latest last. With too many, the first that asks nothing makes place."""
        self._server: asyncio.Server | None = None

    async def start(self, path: str) -> None:
        """Listens; a socket that is there is replaced. Raises `OSError`."""
        self._server = await asyncio.get_running_loop().create_unix_server(self._accept, path)
        os.chmod(path, 0o600)

    def close(self) -> None:
        """Ends every connection."""
        if self._server is not None:
            self._server.close()
        for client in [*self._clients]:
            client.close()

    def _accept(self) -> StreamLink:
        caller = Connection("a caller", self._on_ask, self._most_asks, self._most_bytes, self._load)
        return StreamLink(caller, self._most_bytes, self._admit)

    def _admit(self, client: Connection, end: socket.socket) -> bool:
        if _peer(end)[1] not in (0, os.getuid()):
            return False
        if len(self._clients) >= self._most_clients:
            idle = next((one for one in self._clients if not one.is_asked), None)
            if idle is None:
                return False
            idle.close("another client has its place")
        self._clients[client] = None
        client.ended.add_done_callback(lambda _: self._clients.pop(client, None))
        return True


def _peer(end: socket.socket) -> tuple[int, int]:
    """Returns the process and the user at the other end of a UNIX socket."""
    pid, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


async def _watch(connection: Connection, pid: int, seconds: float) -> None:
    stopped = False
    while True:
        await asyncio.sleep(seconds)
        was_stopped, stopped = stopped, _is_stopped(pid)
        if stopped and was_stopped:
            connection.close(f"its process {pid} is stopped")
            return


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # it has ended, which the kernel tells, or is of another namespace
        return False
