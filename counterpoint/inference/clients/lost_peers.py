"""Has the kernel notice a server whose host is gone or cut off. By itself it takes a quarter of an hour, or for ever."""

from __future__ import annotations

import socket
from typing import Protocol

LOST_SECONDS = 30
"""How long a server's kernel may leave unanswered what was sent to it, or a question whether it is there."""


class ConnectedSocket(Protocol):
    """A connected socket, or what an event loop gives for one."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        """See `socket.socket.setsockopt`."""


def notice_loss(connected: ConnectedSocket) -> None:
    """Has a connection end with an error once its server was lost for `LOST_SECONDS`, whether bytes wait to be sent or not.

    The kernel asks an idle server whether it is there (keep-alive), but not while bytes wait: these have a time-out of their own.
    """
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_SECONDS)
