"""A ZMQ socket on an event loop: what is sent in one iteration of the loop travels together, what arrives is handled in portions.

Both ends use it: the orchestrator a ROUTER, on which all workers of an environment are peers, a worker a DEALER. One iteration of
the loop handles one message that lets a rollout continue: what it does then takes a quarter of a millisecond, and the servers'
responses take their part of the iteration, too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import zmq

from counterpoint.environments.workers.protocol import (
    MAX_BATCH,
    MAX_BATCH_BYTES,
    RESUMING,
    Message,
    ProtocolError,
    pack,
    unpack,
)


class BatchingWire:
    """One socket; it belongs to the wire and is closed with it. `peer` is b"" at a worker's end."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        received: Callable[[bytes, Message], None],
        malformed: Callable[[bytes, str], None],
    ) -> None:
        """`received` is called for each message, `malformed` for a frame that is none of ours."""
        self._socket = socket
        self._received = received
        self._malformed = malformed
        self._is_router = socket.type == zmq.ROUTER
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.fileno()
        self._outbox: dict[bytes, list[Message]] = {}
        self._sizes: dict[bytes, int] = {}
        self._inbox: deque[tuple[bytes, Message]] = deque()
        self._scheduled = False
        self._closed = False
        self._loop.add_reader(self._descriptor, self._readable)
        self._schedule()

    def send(self, peer: bytes, message: Message, nbytes: int = 0) -> None:
        """Sends a message at the end of this iteration of the loop. `nbytes` is the size of the arrays in it."""
        if self._closed:
            return
        waiting = self._outbox.get(peer)
        if waiting is None:
            if not self._outbox:
                self._loop.call_soon(self.flush)
            self._outbox[peer], self._sizes[peer] = [message], nbytes
            return
        waiting.append(message)
        self._sizes[peer] += nbytes
        if len(waiting) >= MAX_BATCH or self._sizes[peer] >= MAX_BATCH_BYTES:
            self._write(peer, waiting)
            self._outbox[peer], self._sizes[peer] = [], 0

    def flush(self) -> None:
        """Sends what waits."""
        if self._closed or not self._outbox:
            return
        outbox, self._outbox, self._sizes = self._outbox, {}, {}
        for peer, messages in outbox.items():
            if messages:
                self._write(peer, messages)
        # The descriptor tells of changes only, and sending may have taken notice of one.
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._schedule()

    def close(self, linger_seconds: float = 0.0) -> None:
        """Sends what waits, and closes the socket."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=int(linger_seconds * 1000))

    def _write(self, peer: bytes, messages: list[Message]) -> None:
        frame = pack(messages)
        try:
            self._socket.send_multipart([peer, frame] if self._is_router else [frame], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise  # a peer that is gone: its death is noticed otherwise

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def _readable(self) -> None:
        if not self._scheduled:
            self._pump()

    def _pump(self) -> None:
        """Handles a portion, up to the first message that lets a rollout continue, and comes again if there may be more."""
        self._scheduled = False
        if self._closed:
            return
        more = bool(self._inbox) or self._read()
        while self._inbox:  # at most one frame's messages
            peer, message = self._inbox.popleft()
            self._received(peer, message)
            if message[0] in RESUMING:
                break
        if more and not self._closed:
            self._schedule()

    def _read(self) -> bool:
        """Reads a frame, which may hold many messages; returns whether there was one."""
        try:
            frames = self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return False
        peer = frames[0] if self._is_router else b""
        try:
            if len(frames) != 1 + self._is_router:
                raise ProtocolError(f"a message of {len(frames)} frames")
            self._inbox.extend((peer, message) for message in unpack(frames[-1]))
        except ProtocolError as error:
            self._malformed(peer, str(error))
        return True
