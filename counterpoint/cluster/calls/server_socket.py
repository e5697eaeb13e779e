"""The ROUTER that a worker takes calls on: on this machine by default, beyond it with CURVE keys."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from zmq.auth.thread import ThreadAuthenticator

from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.loopback import is_loopback
from counterpoint.transport.wires.endpoint import IPC, CurveKeys, socket_path

_COPY_BELOW_BYTES = 2**16
_LINGER_SECONDS = 0.5
_HELD_MESSAGES = 64
"""Messages of one caller that ZMQ reads ahead."""


def call_address(directory: Path, worker: str) -> str:
    """Returns the address at which a worker of the job in `directory` takes calls from this machine.

    It is the same for all its incarnations, so that none leaves a file behind. Raises `PermissionError` when the directory for
    paths that are too long for a socket is another user's.
    """
    return IPC + str(socket_path(directory.resolve(), f"{worker}.calls"))


class ServerSocket:
    """The socket. All but `authorize` is for one thread."""

    def __init__(self, address: str, keys: CurveKeys | None, max_frame_bytes: int) -> None:
        if not address.startswith(IPC) and keys is None and not is_loopback(urlsplit(address).hostname or ""):
            raise ValueError(
                f"{address} is reachable from other machines and needs CURVE keys; use ipc:// or tcp://127.0.0.1"
            )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        socket = self._socket = self._context.socket(zmq.ROUTER)
        socket.router_mandatory = True  # else a message to a peer that is gone is dropped silently
        socket.maxmsgsize = max_frame_bytes  # ZMQ drops a peer whose frame claims more, before it allocates
        socket.rcvhwm = _HELD_MESSAGES
        socket.linger = math.ceil(_LINGER_SECONDS * 1000)
        socket.copy_threshold = _COPY_BELOW_BYTES
        socket.ipv6 = address.startswith("tcp://[")
        if keys is not None:
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
        endpoint = socket.last_endpoint
        assert isinstance(endpoint, bytes)
        self.address = endpoint.decode().rstrip("\0")
        self._poller = zmq.Poller()

    def authorize(self, public_keys: Sequence[bytes]) -> None:
        """Lets exactly the peers with these keys connect from now on; no effect without keys of its own."""
        if self._authenticator is not None:
            self._authenticator.certs["*"] = dict.fromkeys(public_keys, True)

    def poll(self, wake: int, reading: bool, timeout: float) -> bool:
        """Waits for a message, if `reading`, or for the descriptor `wake`. Returns whether there is a message."""
        self._poller.register(wake, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN if reading else 0)
        return any(ready is self._socket for ready, _ in self._poller.poll(math.ceil(timeout * 1000)))

    def receive(self, most: int) -> Iterator[tuple[bytes, Sequence[Buffer]]]:
        """Yields the sender and the frames of up to so many messages that are there."""
        for _ in range(most):
            try:
                sender, *frames = self._socket.recv_multipart(flags=zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            yield sender.bytes, [frame.buffer for frame in frames]

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Sends a message by reference; returns whether the peer is there and reads."""
        try:
            self._socket.send_multipart([peer, *map(as_bytes_view, frames)], flags=zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """Sends what is queued, for a moment, and frees everything."""
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
