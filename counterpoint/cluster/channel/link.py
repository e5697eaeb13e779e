"""A peer's connection to the host of a channel: a thread with a DEALER, which says hello again when the host does not know it.

`producer.py` and `consumer.py` are its owners: they queue work from any thread and call `wake`; the link calls them back, in
its own thread. A host that was restarted asks who is there as soon as the connection is; one that is silent for a lease gets a
new connection.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import zmq

from counterpoint.cluster.channel import protocol
from counterpoint.cluster.channel.protocol import Hello
from counterpoint.cluster.channel.sockets import open_dealer, received, send_frames
from counterpoint.transport.arrays import CodecError
from counterpoint.transport.files.atomic import Buffer
from counterpoint.transport.files.watched import Watched
from counterpoint.transport.rate_limited_log import RateLimitedLog
from counterpoint.transport.wires.endpoint import CurveKeys

logger = logging.getLogger(__name__)

HELLO_SECONDS = 1.0
"""A hello without an answer is said again after so long."""

MESSAGES_A_PASS = 64
CLOSE_SECONDS = 1.0
"""Longest time that a closing end waits for its last messages to be sent."""


class ChannelError(ConnectionError):
    """The channel does not serve this end any more; the message says why."""


class Owner(Protocol):
    """What a link calls, in its thread."""

    def welcomed(self, generation: str, next_position: int) -> None:
        """A session has begun: whatever the host did not confirm has to be sent again."""

    def receive(self, kind: bytes, header: Any, frames: Sequence[Buffer]) -> None:
        """Takes a message. Raises `CodecError` for one that is not for it."""

    def pump(self) -> None:
        """Sends what is queued and may be sent. Only called within a session."""

    def fail(self, error: BaseException) -> None:
        """The link has ended: no session will come."""


class HostLink:
    """Runs from `start` to `close`, or until it fails."""

    def __init__(
        self, address: str, keys: Watched[CurveKeys] | None, hello: Hello, owner: Owner, max_record_bytes: int
    ) -> None:
        """Takes the host's address, which need not exist yet."""
        self.address = address
        self.hello = hello
        self._keys = keys
        self._owner = owner
        self._max_frame_bytes = max(max_record_bytes, protocol.MAX_HEADER_BYTES)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._awake = False
        self._closing = self._closed = False
        self._failed = False
        self._lock = threading.Lock()
        self._in_session = False
        self._lease = 10.0
        self._heard = self._greeted = self._pinged = 0.0
        self._log = RateLimitedLog(logger)
        self._thread = threading.Thread(target=self._run, name=f"channel-{hello.name}", daemon=True)
        self.opened = threading.Event()
        """Set at the first session."""

    def start(self) -> None:
        """Begins to connect. Once only."""
        self._thread.start()

    def wake(self) -> None:
        """Has `pump` called soon. From any thread."""
        if self._awake:
            return
        with self._lock:
            if not self._closed:
                self._awake = True
                os.eventfd_write(self._waker, 1)

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queues a message, large frames by reference. In the link's thread only."""
        assert self._socket is not None
        send_frames(self._socket, frames)

    def close(self, failed: bool = False) -> None:
        """Sends what is queued, says goodbye and whether an error ends this end, and frees everything. Safe to call twice."""
        self._failed = failed
        self._closing = True
        self._awake = False
        self.wake()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        os.close(self._waker)
        self._context.term()

    def silence(self, seconds: float) -> str:
        """Returns what to tell a person when no session has begun for so long."""
        return (
            f"no host of the channel answers at {self.address} within {seconds:g} s; see that a worker hosts it, such as one of "
            "a role with worker = 'counterpoint.cluster:HostWorker'"
        )

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._connect()
            while not self._closing:
                try:
                    self._poll()
                except zmq.ContextTerminated:  # the host was in this process, and was closed
                    self._connect()
            self._say_goodbye()
        except BaseException as error:  # told to the owner, and the thread ends
            if not isinstance(error, ChannelError):
                logger.exception("the link of %s %r failed", self.hello.kind, self.hello.name)
            self._owner.fail(error)
        finally:
            if self._socket is not None:
                self._socket.close(linger=int(CLOSE_SECONDS * 1000) if self._in_session else 0)

    def _connect(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
        keys = None
        if self._keys is not None:
            self._keys.refresh(now=True)
            keys = self._keys.value
        self._socket = open_dealer(self.address, keys, self._context, self._max_frame_bytes)
        self._in_session = False
        self._heard = time.monotonic()
        self._greeted = 0.0
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._waker, zmq.POLLIN)
        self._greet()

    def _greet(self) -> None:
        self._in_session = False
        self._greeted = time.monotonic()
        self.send(protocol.pack_hello(self.hello))

    def _poll(self) -> None:
        ready = dict(self._poller.poll(int(1000 * min(HELLO_SECONDS, self._lease / 4))))
        if self._waker in ready:
            os.eventfd_read(self._waker)
        self._awake = False
        self._read()
        now = time.monotonic()
        if now - self._heard > max(self._lease, 3 * HELLO_SECONDS):
            self._log.note(logging.WARNING, f"{self.hello.name}: no host answers at {self.address}; connecting again")
            self._connect()
        elif not self._in_session:
            if self._keys is not None and self._keys.refresh():
                self._connect()
            elif now - self._greeted > HELLO_SECONDS:
                self._greet()
        else:
            if now - self._pinged > self._lease / 4:
                self._pinged = now
                self.send(protocol.pack(protocol.PING))
            self._owner.pump()

    def _read(self) -> None:
        assert self._socket is not None
        for _ in range(MESSAGES_A_PASS):
            try:
                frames = [received(frame) for frame in self._socket.recv_multipart(zmq.DONTWAIT, copy=False)]
            except zmq.Again:
                return
            self._heard = time.monotonic()
            try:
                self._take(*protocol.unpack(frames))
            except CodecError as error:
                self._log.note(logging.WARNING, f"{self.hello.name}: dropped a message of {self.address}: {error}")

    def _take(self, kind: bytes, header: Any, frames: Sequence[Buffer]) -> None:
        match kind, header:
            case protocol.RESET, None:
                # Several may answer what was sent before the hello; one that answers the hello's own connection comes later.
                if self._in_session or time.monotonic() - self._greeted > HELLO_SECONDS / 10:
                    self._greet()
            case protocol.WELCOME, [str(generation), int(following), float(lease)] if lease > 0:
                self._lease = lease
                self._in_session = True
                self._owner.welcomed(generation, following)
                self.opened.set()
            case protocol.REJECTED, str(reason):
                raise ChannelError(f"{self.hello.kind} {self.hello.name} at {self.address}: {reason}")
            case protocol.PONG, _:
                pass
            case _ if self._in_session:
                self._owner.receive(kind, header, frames)

    def _say_goodbye(self) -> None:
        if self._in_session:
            self._owner.pump()
            self.send(protocol.pack(protocol.BYE, self._failed))
