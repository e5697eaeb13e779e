"""The receiving end of systemd's notification protocol. It imports the standard library alone, since a keeper does."""

from __future__ import annotations

import os
import socket
import struct

MAX_DATAGRAM = 4096
CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid, gid."""


class NotifySocket:
    """Receives the notifications of one worker.

    The socket is in the abstract namespace: nothing is on disk, and nothing is left there. Any process of the machine could
    send to it, so messages are accepted from this user's processes only.
    """

    def __init__(self) -> None:
        self.address = f"@counterpoint-{os.getpid()}-{os.urandom(8).hex()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("\0" + self.address[1:])

    def fileno(self) -> int:
        """Returns the descriptor, for a selector or `loop.add_reader`."""
        return self._socket.fileno()

    def receive(self) -> dict[str, str] | None:
        """Returns the next message's assignments, `{"READY": "1"}`; None when nothing is queued."""
        while True:
            try:
                data, ancillary, _flags, _sender = self._socket.recvmsg(
                    MAX_DATAGRAM, socket.CMSG_SPACE(CREDENTIALS.size)
                )
            except BlockingIOError:
                return None
            uids = [
                CREDENTIALS.unpack(content[: CREDENTIALS.size])[1]
                for level, kind, content in ancillary
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS
            ]
            if uids != [os.getuid()]:
                import logging  # which no keeper needs otherwise

                logging.getLogger(__name__).warning("dropped a notification from another user (uid %s)", uids)
                continue
            lines = data.decode(errors="replace").splitlines()
            return {key: value for key, separator, value in (line.partition("=") for line in lines) if separator}

    def close(self) -> None:
        """Frees the address. Safe to call twice."""
        self._socket.close()
