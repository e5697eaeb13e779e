"""The ZMQ sockets of a channel: the host's ROUTER, which notices at once when a peer's connection breaks, and a peer's DEALER.

Within one process records go by reference, over `inproc`: a peer finds the host of its own process by the address.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.wires.endpoint import IPC, CurveKeys
from counterpoint.transport.wires.listener_keys import WatchedListenerKeys
from counterpoint.transport.wires.reconnecting import find_peer_soon

HEARTBEAT_SECONDS = 2.0
"""ZMQ's own, from its I/O thread; a connection that is silent for three of them breaks."""

COPY_BELOW_BYTES = 2**16

MESSAGES_UNREAD = 64
"""Messages of one peer that the host holds unread."""

ANSWERS_UNSENT = 4096
"""Messages for one peer that it does not read; then its session is over."""

_local: dict[str, tuple[zmq.Context[zmq.Socket[bytes]], str]] = {}
_local_lock = threading.Lock()


class RouterSocket:
    """The host's end. Raises `OSError` when the address is taken or cannot be listened on."""

    def __init__(self, address: str, keys: WatchedListenerKeys | None, max_frame_bytes: int) -> None:
        self.address = address
        self._lock = -1
        if address.startswith(IPC):  # ZMQ replaces a socket file that is there, be it stale or not
            path = Path(f"{address.removeprefix(IPC)}.lock")
            self._lock = take_lock(path, f"cannot listen at {address}: another host of the channel does")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._peers: dict[int, bytes] = {}
        """The routing id behind each descriptor."""
        self._known: set[bytes] = set()
        self._broken: list[bytes] = []
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        set_common(self.socket, address)
        self.socket.router_mandatory = True  # else a message to a peer that is gone is dropped silently
        self.socket.maxmsgsize = max_frame_bytes  # ZMQ drops a peer whose frame claims more, before it allocates
        self.socket.rcvhwm, self.socket.sndhwm = MESSAGES_UNREAD, ANSWERS_UNSENT
        if keys is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", keys)
            self.socket.curve_server = True
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.value.own.public, keys.value.own.secret
        self.monitor = self.socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        try:
            self.socket.bind(address)
            inproc = f"inproc://{id(self)}"
            self.socket.bind(inproc)
        except zmq.ZMQError as error:
            self.close()
            taken = "another process listens there" if error.errno == errno.EADDRINUSE else error.strerror
            raise OSError(error.errno, f"cannot listen at {address}: {taken}") from error
        with _local_lock:
            _local[address] = (self._context, inproc)

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        """Returns the next message and its sender's routing id; None when none is there. Large frames are views."""
        try:
            sender, *frames = self.socket.recv_multipart(flags=zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        routing_id = sender.bytes
        if routing_id not in self._known:
            self._read_monitor()  # the end of an earlier connection with the same descriptor comes first
            descriptor = _descriptor(frames)
            self._known.add(routing_id)
            self._peers[descriptor] = routing_id
        return routing_id, [received(frame) for frame in frames]

    def broken(self) -> list[bytes]:
        """Returns the peers whose connections broke since the last call."""
        self._read_monitor()
        broken, self._broken = self._broken, []
        return broken

    def _read_monitor(self) -> None:
        while self.monitor.poll(0):
            routing_id = self._peers.pop(int(recv_monitor_message(self.monitor)["value"]), None)
            if routing_id is not None:
                self._known.discard(routing_id)
                self._broken.append(routing_id)

    def send(self, routing_id: bytes, frames: Sequence[Buffer]) -> bool:
        """Queues a message, large frames by reference. Returns whether the peer is there and reads its messages."""
        try:
            self.socket.send(routing_id, zmq.SNDMORE | zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
                return False
            raise
        send_frames(self.socket, frames)
        return True

    def close(self) -> None:
        """Frees everything. What is queued for peers is sent for a moment longer."""
        with _local_lock:
            if _local.get(self.address, (None, ""))[0] is self._context:
                del _local[self.address]
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger=500)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        if self._lock >= 0:
            os.close(self._lock)


def open_dealer(
    address: str, keys: CurveKeys | None, own: zmq.Context[zmq.Socket[bytes]], max_frame_bytes: int
) -> zmq.Socket[bytes]:
    """Returns a DEALER to the host at an address: in this process, or by a context of the caller's."""
    with _local_lock:
        context, target = _local.get(address, (own, address))
        socket = context.socket(zmq.DEALER)
    set_common(socket, address)
    socket.probe_router = True  # a host that was restarted then learns of us, and asks who we are
    socket.sndhwm = socket.rcvhwm = 0  # bounded by credit
    socket.maxmsgsize = max_frame_bytes
    find_peer_soon(socket)
    if keys is not None and context is own:
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.connect(target)
    return socket


def set_common(socket: zmq.Socket[bytes], address: str) -> None:
    """Sets what both ends have in common."""
    beat = int(HEARTBEAT_SECONDS * 1000)
    socket.heartbeat_ivl, socket.heartbeat_timeout, socket.heartbeat_ttl = beat, 3 * beat, 3 * beat
    socket.handshake_ivl = 3 * beat
    socket.linger = 0
    socket.copy_threshold = COPY_BELOW_BYTES
    socket.ipv6 = address.startswith("tcp://[")


def received(frame: zmq.Frame) -> Buffer:
    """Returns a frame's bytes: a view of a large one; a copy of a small one, whose view would keep its neighbours' memory."""
    return frame.bytes if len(frame) < COPY_BELOW_BYTES else frame.buffer


def _descriptor(frames: Sequence[zmq.Frame]) -> int:
    """Returns the descriptor of the connection that a message came by; -1 for a peer of this process."""
    try:
        return int(frames[0].get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """Sends one message, large frames by reference."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        view = frame if isinstance(frame, bytes) else as_bytes_view(frame)
        more = zmq.SNDMORE if index < last else 0
        socket.send(view, zmq.DONTWAIT | more, copy=len(view) < COPY_BELOW_BYTES)
