"""How soon a ZMQ socket that connects finds its peer after a network was away.

By itself ZMQ leaves an attempt to the kernel, whose pauses between two packets double to a minute and more. A peer is then found
a minute after the network is back.
"""

from __future__ import annotations

from typing import Any

import zmq

CONNECT_MS = 3000
"""Longest attempt. The kernel sends its packet at once, after a second, and then with pauses that grow."""

FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 100, 2000
"""Pauses between two attempts, doubled after each."""


def find_peer_soon(socket: zmq.Socket[Any]) -> None:
    """Has a socket that is about to connect try again within `CONNECT_MS` and `LONGEST_PAUSE_MS`, as long as it is open."""
    socket.connect_timeout = CONNECT_MS
    socket.reconnect_ivl, socket.reconnect_ivl_max = FIRST_PAUSE_MS, LONGEST_PAUSE_MS
