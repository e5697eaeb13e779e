"""The listening socket: bounded in connections, and in how long a silent or slow client may keep one.

A client that sends half a request is closed after `IDLE_SECONDS`, as is one that sends none. One that does not read its answer is
closed by the kernel. At most `MOST_CONNECTIONS` are open, of which strangers and each owner of a key have a share
(`transport/http/connections.py`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from counterpoint.transport.errors import Obstructed, UserError
from counterpoint.transport.http.connections import BoundedConnections
from counterpoint.transport.process.descriptors import raise_descriptor_limit

IDLE_SECONDS = 30.0
HANDSHAKE_SECONDS = 10.0
CLOSE_SECONDS = 1.0
"""How long the answers that are being sent may take at the end."""

MOST_CONNECTIONS = 2048
"""Of which one key alone has half: the SDK of Tinker opens up to 1,000."""
SPARE_DESCRIPTORS = 256
"""Descriptors for files, beside connections."""

BACKLOG = 128


class ProvenConnections:
    """The connections that have sent a token, as an application notes them."""

    connections: BoundedConnections | None = None
    """Set while it is served."""

    def note(self, request: web.Request, owner: str) -> bool:
        """Notes that a request had a valid token of `owner`; returns False if that has its share of connections already."""
        return self.connections is None or self.connections.prove(request.protocol, owner)


PROVEN = web.AppKey("proven", ProvenConnections)


class _WithoutClientsFaults(logging.Filter):
    """Leaves out what is no HTTP: each such request would cost us lines of a log, and they may quote its token."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


def _logger() -> logging.Logger:
    found = logging.getLogger(f"{__name__}.http")
    if not found.filters:
        found.addFilter(_WithoutClientsFaults())
    return found


@asynccontextmanager
async def listening(
    app: web.Application, host: str, port: int, certificate: ssl.SSLContext | None
) -> AsyncIterator[int]:
    """Serves `app` during the block. Yields the port.

    Raises `Obstructed` if the port is taken, and `UserError` for an address that is not ours.
    """
    most = _most_connections()
    runner = web.AppRunner(
        app,
        auto_decompress=False,
        access_log=None,
        logger=_logger(),
        keepalive_timeout=IDLE_SECONDS,
        shutdown_timeout=CLOSE_SECONDS,
        lingering_time=IDLE_SECONDS,
    )
    await runner.setup()
    accept = runner.server
    assert accept is not None  # after `setup`
    app[PROVEN].connections = connections = BoundedConnections(accept, most)
    try:
        listener = _listener(host, port)
        server = await asyncio.get_running_loop().create_server(
            connections.connect,
            sock=listener,
            ssl=certificate,
            backlog=BACKLOG,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if certificate else None,
        )
        try:
            yield listener.getsockname()[1]
        finally:
            server.close()
    finally:
        await runner.cleanup()


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(f"host = {host!r}: {error.strerror}; expected an address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The sockets that `accept` returns inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(IDLE_SECONDS * 1000))
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise Obstructed(f"cannot listen on {host}, port {port}: {error.strerror}; --port gives another") from None
    return listener


def _most_connections() -> int:
    """Raises the limit on descriptors as far as this process may, and returns how many connections fit in it."""
    limit = raise_descriptor_limit(MOST_CONNECTIONS + SPARE_DESCRIPTORS)
    return max(1, min(MOST_CONNECTIONS, limit - SPARE_DESCRIPTORS))
