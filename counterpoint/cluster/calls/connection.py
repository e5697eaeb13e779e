"""A caller's connection to one worker: a DEALER, and the monitor that tells whether the worker is there.

ZMQ's own threads send and answer heartbeats. So a worker that computes and holds the GIL is not silent, while one that was
stopped or whose machine is gone is. For one thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from counterpoint.cluster.member import Member
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.wires.endpoint import CurveKeys
from counterpoint.transport.wires.reconnecting import find_peer_soon

_COPY_BELOW_BYTES = 2**16

_FAILED_HANDSHAKES = (
    zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


class Connected:
    """The worker answers."""


class Lost(str):
    """The worker does not answer any more; why. What was sent may be lost."""


Event = Connected | Lost | list[Buffer]
"""What `read` returns; a list is the frames of a message."""


class Connection:
    """The connection to a member's address; it waits for a worker that is not there yet.

    Raises `zmq.ZMQError` for an address or a key that is none.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        member: Member,
        keys: CurveKeys | None,
        heartbeat_seconds: float,
        max_frame_bytes: int,
    ) -> None:
        self._heartbeat_seconds = heartbeat_seconds
        socket = self.socket = context.socket(zmq.DEALER)
        beat = max(1, math.ceil(heartbeat_seconds * 1000))
        # A worker that stops just after it answered gets the next ping a heartbeat later, and has one to answer it.
        socket.heartbeat_ivl, socket.heartbeat_timeout, socket.handshake_ivl = beat, beat, 2 * beat
        find_peer_soon(socket)
        socket.sndhwm = socket.rcvhwm = 0  # bounded by the calls in flight
        socket.maxmsgsize = max_frame_bytes
        socket.linger = 0
        socket.copy_threshold = _COPY_BELOW_BYTES
        socket.ipv6 = member.address.startswith("tcp://[")
        events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | _FAILED_HANDSHAKES
        self.monitor = socket.get_monitor_socket(events)
        try:
            if keys is not None and member.server_key:
                socket.curve_serverkey = member.server_key.encode()
                socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
            socket.connect(member.address)
        except zmq.ZMQError:
            self.close()
            raise

    def read(self) -> list[Event]:
        """Returns what happened since the last call. After a `Lost`, which comes last, the connection is to be closed."""
        # The monitor is read first and a loss reported last, so that no message that arrived before it is lost with it.
        changes: list[Connected | Lost] = []
        while self.monitor.poll(0):
            changes.append(self._change(zmq.Event(recv_monitor_message(self.monitor)["event"])))
        received: list[Event] = []
        while True:
            try:
                frames = self.socket.recv_multipart(flags=zmq.DONTWAIT, copy=False)
            except zmq.Again:
                break
            received.append([frame.buffer for frame in frames])
        lost = [change for change in changes if isinstance(change, Lost)]
        connected: list[Event] = [change for change in changes if isinstance(change, Connected)]
        return [*connected, *received, *lost[:1]]

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queues a message by reference; never blocks."""
        self.socket.send_multipart([*map(as_bytes_view, frames)], flags=zmq.DONTWAIT, copy=False)

    def close(self) -> None:
        """Frees it; what is queued is dropped."""
        self.socket.disable_monitor()
        self.monitor.close()  # disabling does not close it, and a context waits for every socket
        self.socket.close()

    def _change(self, event: zmq.Event) -> Connected | Lost:
        match event:
            case zmq.Event.HANDSHAKE_SUCCEEDED:
                return Connected()
            case zmq.Event.HANDSHAKE_FAILED_AUTH:
                return Lost("it does not know this worker's CURVE key")
            case zmq.Event.DISCONNECTED:
                return Lost(f"its connection broke, or it was silent for {self._heartbeat_seconds:g} s")
            case _:
                return Lost("the handshake failed, or was not answered in time")
