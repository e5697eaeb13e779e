"""TCP ports of loopback: free ones, and one that is taken."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


def free_port() -> int:
    """Returns a port that nothing listens on now. Another process may take it before the caller does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def taken_port() -> Iterator[int]:
    """Yields a port that a socket listens on for as long as the block lasts."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])
