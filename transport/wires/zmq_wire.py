"""ZMQ: a DEALER at the orchestrator's end, a ROUTER at the trainer's.

A new DEALER is made for every connection, as an old one would deliver its queued messages to a trainer that has had no
`Hello`. ZMQ's own heartbeats run in its I/O thread, so a trainer that computes for minutes counts as alive, and one that was
killed or stopped is noticed. Large frames are passed by reference; small ones are copied, which costs less.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import IPPROTO_TCP, TCP_INFO
from socket import socket as socket_of
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from counterpoint.transport.arrays import CodecError
from counterpoint.transport.codec import MAX_ANSWER_BYTES
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.files.lock import take_listener_lock
from counterpoint.transport.files.watched import Watched
from counterpoint.transport.process.yield_gil import yielding_gil
from counterpoint.transport.wires.endpoint import IPC, CurveKeys
from counterpoint.transport.wires.listener_keys import WatchedListenerKeys
from counterpoint.transport.wires.reconnecting import find_peer_soon

logger = logging.getLogger(__name__)

_COPY_BELOW_BYTES = 2**16

_FIND_SECONDS = 1.0
"""How often a connection that is not made yet asks where the trainer is."""

_REBIND_SECONDS = 5.0
"""How long the address may take to be free again."""

_FRAMES_AT_ONCE = 64
"""Frames passed to ZMQ between two rests, so that a message of thousands does not keep the GIL from the event loop."""

_FAILED_HANDSHAKES = (
    zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


LINGER_SECONDS = 2.0
"""How long a closing end waits for what is queued. The rest is in the durable record, and is sent again."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The trainer's end answers; a `Hello` will reach it."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The trainer's end is gone, or another trainer answers. Messages already written may be lost."""

    reason: str
    silent_seconds: float = 0.0
    """How long it had not been heard of when this was noticed, as far as the wire knows."""


Arrived = list[Buffer]
"""The frames of one message."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One message as the wire delivered it."""

    sender: bytes
    """The address for an answer; empty when none can be sent."""
    origin: str
    """The sender's address, for people."""
    frames: list[Buffer] | CodecError
    """Its frames, or why the wire could not read them."""


class ZmqConnection:
    """The end of a DEALER, for the link's thread."""

    def __init__(
        self, address: str, keys: Watched[CurveKeys] | None, heartbeat_seconds: float, find: Callable[[], str]
    ) -> None:
        """`address` is the configured one, for people; `find` returns the one at which the trainer is reached now."""
        self.peer = f"the trainer at {address}"
        """The other end and its address, for people."""
        self._find = find
        self._address = address
        self._is_connected = False
        self._keys = keys
        self._heartbeat_seconds = heartbeat_seconds
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._descriptor = -1
        """The descriptor of the newest connection; ZMQ owns it."""
        self._heard: float | None = None
        """The time when anything last came by it, on the monotonic clock; None where the kernel does not tell."""

    def open(self) -> None:
        """Begins to connect anew, and waits for a peer that is not there yet.

        Messages written before are not sent, and none of an earlier connection is returned.
        """
        self._drop(0.0)
        if self._context is None:
            self._context = zmq.Context()
        self._address = self._find()
        socket = _socket(self._context, zmq.DEALER, self._address, self._heartbeat_seconds)
        socket.sndhwm = 0  # bounded by the trainer's credit, and a thread that blocks here would not notice a loss
        socket.maxmsgsize = MAX_ANSWER_BYTES
        find_peer_soon(socket)
        if self._keys is not None:
            self._keys.refresh(now=True)
            keys = self._keys.value
            socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = (
                keys.server_public,
                keys.public,
                keys.secret,
            )
        events = zmq.Event.CONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | _FAILED_HANDSHAKES
        self._monitor = socket.get_monitor_socket(events)
        self._socket = socket
        socket.connect(self._address)

    def poll(self, wake: int, timeout: float) -> list[Connected | Lost | Arrived]:
        """Returns the events since the last call, in order; none between `Lost` and `open`.

        Returns after `timeout` seconds, or early when descriptor `wake` becomes readable.
        """
        poller = zmq.Poller()
        poller.register(wake, zmq.POLLIN)
        for socket in (self._socket, self._monitor):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        self._note_heard()
        if self._socket is not None and not self._is_connected:
            timeout = min(timeout, _FIND_SECONDS)
            if self._find() != self._address:
                self._drop(0.0)
                return [Lost("it is at another address now")]
        poller.poll(_milliseconds(timeout if self._heard is None else min(timeout, self._heartbeat_seconds)))
        # The monitor is read first and reported last, so that nothing that arrived before a loss is lost with it.
        changes = self._read_monitor()
        events: list[Connected | Lost | Arrived] = [*self._read_messages()]
        lost = next((change for change in changes if isinstance(change, Lost)), None)
        if lost is not None:
            self._drop(0.0)
            return [*events, lost]
        return [*changes, *events]

    def write(self, frames: Sequence[Buffer]) -> None:
        """Queues one message by reference. Never blocks on the peer."""
        assert self._socket is not None
        for start in yielding_gil(range(0, len(frames), _FRAMES_AT_ONCE)):
            for index, frame in enumerate(frames[start : start + _FRAMES_AT_ONCE], start + 1):
                more = zmq.SNDMORE if index < len(frames) else 0
                self._socket.send(as_bytes_view(frame), flags=zmq.DONTWAIT | more, copy=False)

    def close(self, linger: float) -> None:
        """Waits at most `linger` seconds for what is queued, then frees everything, until `open`."""
        self._drop(linger)
        if self._context is not None:
            self._context.term()
            self._context = None

    def _read_monitor(self) -> list[Connected | Lost]:
        changes: list[Connected | Lost] = []
        while self._monitor is not None and self._monitor.poll(0):
            message = recv_monitor_message(self._monitor)
            event = zmq.Event(message["event"])
            if event is zmq.Event.CONNECTED:
                self._descriptor = int(message["value"])
                continue
            if event is zmq.Event.HANDSHAKE_SUCCEEDED:
                self._is_connected = True
                changes.append(Connected())
                continue
            self._descriptor = -1  # closed; the number may be given to another file
            if event in _FAILED_HANDSHAKES:
                changes.append(Lost(_handshake_failure(event)))
            else:
                silent_seconds = 0.0 if self._heard is None else time.monotonic() - self._heard
                changes.append(Lost("the connection broke, or its heartbeat stopped", silent_seconds))
        return changes

    def _note_heard(self) -> None:
        silent_seconds = silence_of(self._descriptor)
        if silent_seconds is not None:
            self._heard = time.monotonic() - silent_seconds

    def _read_messages(self) -> list[Arrived]:
        messages: list[Arrived] = []
        while self._socket is not None and self._socket.poll(0):
            messages.append(list(self._socket.recv_multipart()))
        return messages

    def _drop(self, linger: float) -> None:
        if self._socket is None or self._monitor is None:
            return
        _close(self._socket, self._monitor, linger)
        self._socket = self._monitor = None
        self._descriptor, self._heard, self._is_connected = -1, None, False


class ZmqListener:
    """The trainer's ROUTER. `keys` are read again once they change; who may not connect any longer is cut off.

    Raises `OSError` when the address is in use or cannot be listened on.
    """

    def __init__(
        self,
        address: str,
        keys: WatchedListenerKeys | None,
        heartbeat_seconds: float,
        max_frame_bytes: int,
        credit: int,
    ) -> None:
        self._address = address
        self._keys = keys
        self._lock: int | None = None
        if address.startswith(IPC):  # ZMQ replaces a socket file that is there, be it stale or not
            self._lock = take_listener_lock(Path(f"{address.removeprefix(IPC)}.lock"), address)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        socket = _socket(self._context, zmq.ROUTER, address, heartbeat_seconds)
        socket.router_mandatory = True  # else a message to a peer that is gone is dropped silently
        socket.maxmsgsize = max_frame_bytes  # ZMQ drops a peer whose frame claims more, before it allocates
        socket.rcvhwm = credit + 8  # messages of one peer held; one that ignores its credit is not read further
        if keys is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", keys)
            socket.curve_server = True
            self._listens_with = keys.value
            socket.curve_publickey, socket.curve_secretkey = keys.value.own.public, keys.value.own.secret
        self._monitor = socket.get_monitor_socket(_FAILED_HANDSHAKES)
        self._socket: zmq.Socket[bytes] | None = socket
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self.close(0.0)
            hint = (
                "another process listens there; stop it or set transport.address"
                if error.errno == errno.EADDRINUSE
                else ""
            )
            raise OSError(error.errno, f"cannot listen on {address}: {hint or error.strerror}") from error
        self._bound = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def poll(self, timeout: float) -> Arrival | None:
        """Returns the next message, or None after at most `timeout` seconds."""
        assert self._socket is not None, "the receiver is closed"
        if self._keys is not None:
            self._follow(self._keys, self._socket)
        ready = dict(self._poller.poll(_milliseconds(timeout)))
        if self._monitor in ready and self._socket not in ready:  # messages come before failed handshakes
            event = recv_monitor_message(self._monitor)
            failure = _handshake_failure(zmq.Event(event["event"]))
            here = event["endpoint"].decode(errors="replace")  # ZMQ does not tell whose connection it was
            return Arrival(b"", f"of unknown address; it connected to this end, {here}", CodecError(failure))
        if self._socket not in ready:
            return None
        sender, *frames = self._socket.recv_multipart(copy=False)
        return Arrival(sender.bytes, _origin(frames), [frame.buffer for frame in frames])

    def _follow(self, keys: WatchedListenerKeys, socket: zmq.Socket[bytes]) -> None:
        """Listens anew, which ends every connection, if not all who are connected may be."""
        keys.refresh()
        former, current = self._listens_with, keys.value
        self._listens_with = current
        if current is former or current.admits_all_of(former):
            return
        logger.warning(
            "the keys at %s have changed: every connection ends, and whoever may connect comes back", self._address
        )
        socket.unbind(self._bound)
        socket.curve_publickey, socket.curve_secretkey = current.own.public, current.own.secret
        deadline = time.monotonic() + _REBIND_SECONDS
        while True:  # ZMQ gives the address up in a thread of its own
            try:
                socket.bind(self._address)
                return
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise OSError(error.errno, f"cannot listen on {self._address} again: {error.strerror}") from error
                time.sleep(0.01)

    def write(self, sender: bytes, frames: Sequence[Buffer]) -> bool:
        """Queues one message; returns False when that sender is gone. Never blocks on it."""
        assert self._socket is not None, "the receiver is closed"
        try:
            self._socket.send_multipart([sender, *map(as_bytes_view, frames)], flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
                return False
            raise
        return True

    def close(self, linger: float) -> None:
        """Waits at most `linger` seconds for what is queued, then frees everything. Safe to call twice."""
        if self._socket is None:
            return
        _close(self._socket, self._monitor, linger)
        self._socket = None
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        if self._lock is not None:
            os.close(self._lock)


def _socket(
    context: zmq.Context[Any], kind: zmq.SocketType, address: str, heartbeat_seconds: float
) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    beat = max(1, int(min(heartbeat_seconds, 1000.0) * 1000))
    socket.heartbeat_ivl, socket.heartbeat_timeout, socket.heartbeat_ttl = beat, 3 * beat, 3 * beat
    socket.handshake_ivl = 3 * beat
    socket.linger = 0
    socket.copy_threshold = _COPY_BELOW_BYTES
    socket.ipv6 = address.startswith("tcp://[")
    return socket


def _close(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], linger: float) -> None:
    socket.disable_monitor()
    monitor.close()  # disabling does not close it, and a context waits for every socket
    socket.close(linger=_milliseconds(linger))


def _milliseconds(seconds: float) -> int:
    return math.ceil(min(seconds, 3600.0) * 1000)


def _handshake_failure(event: zmq.Event) -> str:
    match event:
        case zmq.Event.HANDSHAKE_FAILED_AUTH:
            return "the handshake failed: the CURVE key is not among the trainer's authorized keys"
        case zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            return "the handshake failed: the other end has no or the wrong CURVE keys, or is no ZMQ peer"
        case _:
            return "the handshake failed: the other end hung up or did not answer in time"


def silence_of(descriptor: int) -> float | None:
    """Returns for how many seconds nothing has come by a TCP connection, a heartbeat included; None for any other descriptor."""
    try:
        connection = socket_of(fileno=descriptor)
    except (OSError, ValueError):  # by now it may be another's, and no socket; -1 is none
        return None
    try:
        return int.from_bytes(connection.getsockopt(IPPROTO_TCP, TCP_INFO, 60)[52:56], sys.byteorder) / 1000
    except OSError:
        return None
    finally:
        connection.detach()  # ZMQ closes it


def _origin(frames: Sequence[zmq.Frame]) -> str:
    try:
        return str(frames[0]["Peer-Address"]) or "a local process"
    except (IndexError, zmq.ZMQError):
        return "a local process"
