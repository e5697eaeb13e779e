"""Bounds an HTTP server's connections: beyond the bound, one whose client has proven nothing makes room for a new one.

So whoever opens many connections and sends little on them keeps out nobody who has a token or key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol, cast


class Handler(Protocol):
    """The part of `aiohttp.web.Server` that is used."""

    @property
    def connections(self) -> Iterable[Any]:
        """The open connections, in the order in which they were made."""

    def __call__(self) -> Any:
        """Returns the protocol of a new connection."""


class BoundedConnections:
    """Admits at most `most` connections of a server."""

    def __init__(self, handler: Handler, most: int) -> None:
        self._handler = handler
        self._most = most
        self._proven: set[Any] = set()
        """Connections whose client has sent a valid token, and some that have ended since."""

    def connect(self) -> asyncio.BaseProtocol:
        """Returns the protocol of a new connection. Beyond the bound the oldest unproven one is closed, else the new one."""
        connections = list(self._handler.connections)
        if len(self._proven) > len(connections):
            self._proven.intersection_update(connections)
        if len(connections) >= self._most:
            # One that was closed just now is still listed, without its transport.
            unproven = (each for each in connections if each not in self._proven and each.transport is not None)
            if (stranger := next(unproven, None)) is None:
                return _Full()
            stranger.force_close()
        made: asyncio.BaseProtocol = self._handler()
        return made

    def prove(self, connection: object) -> None:
        """Notes that the client of a connection has sent a valid token."""
        self._proven.add(connection)


class _Full(asyncio.Protocol):
    """A connection beyond the bound: closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()  # uvloop's are none by inheritance
