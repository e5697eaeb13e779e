"""TCP ports of loopback: free ones, and one that is taken."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOWEST = 20_000
"""Below are the ports that Ray gives its workers."""

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The kernel gives a port of this range to each connection that is opened, and to a listener that asks for any. One that is free
now may be taken when a server that takes half a minute to start listens at it."""

_given: set[int] = set()
"""By this process."""


def free_port() -> int:
    """Returns a port that nothing listens on, and that the kernel gives to nobody: only who names it can take it."""
    below = int(EPHEMERAL.read_text().split()[0])
    begin = 1000 * os.getpid()  # processes of tests beside each other begin at different ones
    for number in range(begin, begin + below - LOWEST, 10):  # a job may take those that follow for further servers
        port = LOWEST + number % (below - LOWEST)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port
    raise AssertionError(f"no port from {LOWEST} to {below} is free")


@contextmanager
def taken_port() -> Iterator[int]:
    """Yields a port that a socket listens on for as long as the block lasts."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])
