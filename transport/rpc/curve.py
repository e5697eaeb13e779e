"""A link over TCP with keys: ZMQ's CURVE, which encrypts and knows both ends by their public keys.

ZMQ's own threads send and answer heartbeats, so a peer that computes and holds the GIL is not silent. Python's `ssl` was the
alternative: it can pin a peer's certificate only as one of its authorities, makes no keys, and needs heartbeats of our own.
"""

from __future__ import annotations

import asyncio
import errno
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.rpc.connection import MOST_BYTES, MOST_CLIENTS, Connection, OpenAsks, PeerAsk, most_together
from counterpoint.transport.wires.endpoint import CurveKeys
from counterpoint.transport.wires.reconnecting import find_peer_soon

_COPY_BELOW_BYTES = 2**16
_CURVE_BYTES = 64
"""More than CURVE adds to a frame."""

_UNREAD_MESSAGES = 64
_RECEIVED_AT_ONCE = 32
_LINGER_MS = 500


class _Socket:
    """A ZMQ socket on the running loop: `_read` is called while there is something to read."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, most_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        socket = self._socket = context.socket(kind)
        socket.maxmsgsize = most_bytes + _CURVE_BYTES  # ZMQ drops a peer whose frame claims more, before it allocates
        socket.copy_threshold = _COPY_BELOW_BYTES
        socket.ipv6 = address.startswith("tcp://[")
        self._scheduled = self._closed = False

    def _watch(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._schedule)
        self._schedule()

    def _schedule(self) -> None:
        """Reads soon. ZMQ's descriptor tells of changes only, and also sending uses them up."""
        if not (self._scheduled or self._closed):
            self._scheduled = True
            self._loop.call_soon(self._read_some)

    def _read_some(self) -> None:
        self._scheduled = False
        for _ in range(_RECEIVED_AT_ONCE):
            if self._closed:
                return
            try:
                frames = self._socket.recv_multipart(flags=zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._take([frame.buffer for frame in frames])
        self._schedule()

    def _take(self, frames: list[Buffer]) -> None:
        raise NotImplementedError

    def _write(self, frames: Sequence[Buffer]) -> bool:
        """Queues a message by reference; returns whether the peer is there and reads."""
        try:
            self._socket.send_multipart([*map(as_bytes_view, frames)], flags=zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
                return False
            raise
        finally:
            self._schedule()
        return True

    def close(self) -> None:
        """Frees it; safe to call twice."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()


class _Asker(_Socket):
    """The `PeerLink` of the end that connects."""

    def __init__(self, connection: Connection, address: str, key: str, keys: CurveKeys, seconds: float, most: int):
        super().__init__(zmq.Context.instance(), zmq.DEALER, address, most)
        self._connection, connection.link, self._seconds = connection, self, seconds
        socket, beat = self._socket, max(1, math.ceil(seconds * 1000))
        # A peer that stops just after it answered gets the next ping a heartbeat later, and has one to answer it.
        socket.heartbeat_ivl, socket.heartbeat_timeout, socket.handshake_ivl = beat, beat, 2 * beat
        find_peer_soon(socket)
        socket.sndhwm = socket.rcvhwm = socket.linger = 0  # bounded by what is asked
        failed = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
        events = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH | failed
        self._monitor = socket.get_monitor_socket(events)
        try:
            socket.curve_serverkey = key.encode()
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
            socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise
        self._loop.add_reader(self._monitor.fileno(), self._look)
        self._watch()
        self._look()

    def send(self, frames: Sequence[Buffer]) -> None:
        """See `PeerLink`."""
        self._write(frames)

    def _take(self, frames: list[Buffer]) -> None:
        self._connection.received(frames)

    def _look(self) -> None:
        while not self._closed and self._monitor.poll(0):
            match zmq.Event(recv_monitor_message(self._monitor)["event"]):
                case zmq.Event.HANDSHAKE_FAILED_AUTH:
                    reason = "it does not know this worker's CURVE key"
                case zmq.Event.DISCONNECTED:
                    reason = f"its connection broke, or it was silent for {self._seconds:g} s"
                case _:
                    reason = "the handshake failed, or was not answered in time"
            self._read_some()  # what came before is not lost with it
            self._connection.close(reason)

    def close(self) -> None:
        """See `PeerLink`."""
        if not self._closed:
            self._loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close()  # disabling does not close it
        super().close()


def connect_curve(
    address: str,
    key: str,
    keys: CurveKeys,
    name: str,
    heartbeat_seconds: float,
    most_bytes: int = MOST_BYTES,
    most_asks: int = sys.maxsize,
) -> Connection:
    """Connects to `name`, whose public key is `key`, and waits for it if it is not there yet: the first ask has a deadline.

    `most_asks` and `most_bytes` are those of its listener.

    Raises `OSError` for an address or a key that is none.
    """
    connection = Connection(name, None, most_asks, most_bytes)
    try:
        _Asker(connection, address, key, keys, heartbeat_seconds, most_bytes)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"{address!r} with key {key!r}: {error.strerror}") from error
    return connection


class CurveListener(_Socket):
    """Answers peers whose public keys were given to `authorize`, at a TCP address. Raises `OSError` if it cannot listen."""

    def __init__(
        self,
        address: str,
        keys: CurveKeys,
        on_ask: Callable[[PeerAsk], object],
        most_asks: int,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        super().__init__(self._context, zmq.ROUTER, address, most_bytes)
        self._on_ask, self._most_asks, self._most_bytes = on_ask, most_asks, most_bytes
        self._clients: dict[bytes, Connection] = {}
        self._load = OpenAsks(MOST_CLIENTS * most_asks, 4 * most_together(most_bytes))
        socket = self._socket
        socket.router_mandatory = True  # else a message to a peer that is gone is dropped silently
        socket.rcvhwm, socket.linger = _UNREAD_MESSAGES, _LINGER_MS
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self.authorize([])
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot take calls on {address}: {error.strerror}") from error
        self.address = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._watch()

    def authorize(self, public_keys: Sequence[bytes]) -> None:
        """Lets exactly the peers with these keys connect from now on."""
        self._authenticator.certs["*"] = dict.fromkeys(public_keys, True)

    def _take(self, frames: list[Buffer]) -> None:
        peer = bytes(as_bytes_view(frames[0]))
        client = self._clients.get(peer)
        if client is None:
            most_asks = self._most_asks
            if len(self._clients) >= MOST_CLIENTS:  # ZMQ does not tell who has left
                self._clients = {peer: known for peer, known in self._clients.items() if known.is_asked}
                most_asks = most_asks if len(self._clients) < MOST_CLIENTS else 0  # its asks are refused
            client = Connection("a caller", self._on_ask, most_asks, self._most_bytes, self._load)
            client.link = _Client(self, peer)
            if most_asks:
                self._clients[peer] = client
        client.received(frames[1:])

    def close(self) -> None:
        """Sends what is queued, for a moment, and frees everything."""
        super().close()
        self._authenticator.stop()
        self._context.term()


@dataclass(slots=True)
class _Client:
    """The `PeerLink` to one peer of a listener."""

    listener: CurveListener
    peer: bytes

    def send(self, frames: Sequence[Buffer]) -> None:
        """See `PeerLink`: a peer that is gone, or does not read, gets nothing."""
        self.listener._write([self.peer, *frames])

    def close(self) -> None:
        """See `PeerLink`: nothing is kept of it."""
