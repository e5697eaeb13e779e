"""Bounds an HTTP server's connections, and shares them among those who have proven a token or key, and strangers.

An owner of a key may have as many as are left free afterwards (`transport/room.py`), and strangers half of what owners leave: so
whoever opens many connections keeps out nobody else, with a key or without one. An owner's connection beyond its share is
answered and closed; a stranger's makes the oldest one of a stranger go.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable, Iterable
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
        self._owners: dict[Any, Hashable] = {}
        """Whose key each connection has sent; some have ended since."""

    def connect(self) -> asyncio.BaseProtocol:
        """Returns the protocol of a new connection. Beyond the strangers' share, their oldest connection is closed."""
        # One that was closed just now is still listed, without its transport.
        connections = [each for each in self._handler.connections if each.transport is not None]
        strangers = [each for each in connections if each not in self._owners]
        free = self._most - (len(connections) - len(strangers))
        if strangers and len(strangers) >= free // 2:
            strangers[0].force_close()
        elif not free:
            return _Full()
        made: asyncio.BaseProtocol = self._handler()
        return made

    def prove(self, connection: Any, owner: Hashable) -> bool:
        """Notes that the client of a connection has sent a key of `owner`.

        Returns False if the owner has its share already: the connection is then closed once the client has an answer.
        """
        if self._owners.get(connection) == owner:
            return True
        self._owners = {
            each: whose for each in self._handler.connections if (whose := self._owners.get(each)) is not None
        }
        held = Counter(self._owners.values())
        if held[owner] + 1 > self._most - held.total() - 1:
            connection.close()
            return False
        self._owners[connection] = owner
        return True


class _Full(asyncio.Protocol):
    """A connection beyond the bound: closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()  # uvloop's are none by inheritance
