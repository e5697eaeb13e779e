"""HTTP to inference servers: one session for model calls, another for administration, and one reading of failures.

The two are separate so that a health check or an update never queues behind a thousand completions. Settings: no limit on
connections (the pool bounds requests), long keep-alive, an explicit connect deadline, a large read buffer. Our own routes are
asked by two `BinaryHttpClient`s of each server instead, which queue apart, too, and small model calls by its `ManyCalls`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np

from counterpoint.inference import identity
from counterpoint.inference.base import ServerFailure, ServerUnreachable
from counterpoint.inference.clients.binary_http import BinaryHttpClient, TickLimits
from counterpoint.inference.clients.failures import ERROR_BYTES, NOTHING_LISTENS, failure_of
from counterpoint.inference.clients.lost_peers import notice_loss
from counterpoint.inference.clients.many_calls import ManyCalls
from counterpoint.inference.clients.weight_sender import WeightSender
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.token import watched_tokens
from counterpoint.inference.wire import MAX_RESPONSE_BYTES
from counterpoint.transport.files.watched import LOOK_SECONDS, Watched

logger = logging.getLogger(__name__)

KEEPALIVE_SECONDS = 600.0
READ_BUFFER_BYTES = 1 << 20

MAX_SENDERS = 256
"""Servers that weights are sent to at once, each by a thread that mostly waits."""


class HttpSessions:
    """The sessions, shared by the clients of all servers."""

    def __init__(self, config: PoolConfig) -> None:
        """Opens nothing yet. Raises `ValueError` for a file that `config` needs and that is not there."""
        self._config = config
        self._tokens = None if config.api_key_file is None else watched_tokens(config.api_key_file)
        self._sent_token: str | None = None
        self._sent_headers = _headers_with(None)
        self.identity_file = config.identity_file
        self.secret = identity.read(config.identity_file)
        """The secret by which the servers prove that they are the job's; None for servers that belong to none."""
        self._own_tls: ssl.SSLContext | None = None
        self._watched: list[Watched[Any]] = [] if self._tokens is None else [self._tokens]
        if config.ca_file is not None:
            self._own_tls = tls_of(config.ca_file)
            self._watched.append(_watched_authorities(config.ca_file, self._own_tls))
        self.data: aiohttp.ClientSession
        self.admin: aiohttp.ClientSession
        self._limits, self._admin_limits = TickLimits(), TickLimits()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="inference memory")
        self._senders = ThreadPoolExecutor(max_workers=MAX_SENDERS, thread_name_prefix="sending weights")
        self._binary_clients: list[BinaryHttpClient | ManyCalls] = []
        self._watching: asyncio.Task[None] | None = None

    def _headers(self) -> Mapping[str, str]:
        """Returns what every request has, with the newest token: the same object while that is the same."""
        token = None if self._tokens is None else self._tokens.value[0]
        if token != self._sent_token:
            self._sent_token, self._sent_headers = token, _headers_with(token)
        return self._sent_headers

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for each in self._watched:
                await asyncio.get_running_loop().run_in_executor(self._threads, each.refresh)

    def binary_client(self, url: str, *, administers: bool = False) -> BinaryHttpClient:
        """Returns a binary client of the server at `url`, for model calls or administration, closed with these sessions."""
        timeout = self._config.connect_timeout_seconds
        limits = self._admin_limits if administers else self._limits
        client = BinaryHttpClient(url, self._headers, timeout, limits, self._threads, lambda: self._tls)
        self._binary_clients.append(client)
        return client

    def weight_sender(self, url: str) -> WeightSender | None:
        """Returns what sends weights to the server at `url`; None if it reads them from the job's directory."""
        if not self._config.send_weights:
            return None
        timeout = self._config.connect_timeout_seconds
        return WeightSender(url, self._headers, timeout, self._senders, lambda: self._tls)

    def many_calls(self, http: BinaryHttpClient) -> ManyCalls:
        """Returns what makes many model calls of the server that `http` asks by one connection, closed with these sessions."""
        calls = ManyCalls(http, self._limits.heads)
        self._binary_clients.append(calls)
        return calls

    def forget(self, client: BinaryHttpClient | ManyCalls) -> None:
        """Closes one binary client now."""
        self._binary_clients.remove(client)
        client.close()

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return self._own_tls or ssl.create_default_context()

    async def __aenter__(self) -> HttpSessions:
        self.data, self.admin = self._open(), self._open()
        if self._watched:
            self._watching = asyncio.create_task(self._watch(), name="follower of the servers' token and authorities")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._binary_clients:
            client.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        self._threads.shutdown(wait=False, cancel_futures=True)  # A mapping may take most of a second.
        self._senders.shutdown(wait=False, cancel_futures=True)  # Those under way were cancelled, and end soon.
        await asyncio.gather(self.data.close(), self.admin.close())

    async def _with_headers(
        self, request: aiohttp.ClientRequest, handle: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        request.headers.update(self._headers())
        return await handle(request)

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=KEEPALIVE_SECONDS,
                ssl=self._own_tls or True,
                socket_factory=_open_socket,
            ),
            # The pool sets the deadline of a whole request; only the connect has one here.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_timeout_seconds),
            read_bufsize=READ_BUFFER_BYTES,
            middlewares=(self._with_headers,),
            cookie_jar=aiohttp.DummyCookieJar(),
        )


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    notice_loss(opened)
    return opened


def tls_of(ca_file: Path) -> ssl.SSLContext:
    """Returns a context that accepts servers with a certificate for their name, signed by an authority in `ca_file`.

    Raises `ValueError`, naming the absolute path.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # of the file or of its content
        raise ValueError(
            f"ca_file = {str(ca_file.absolute())!r}: {error.strerror or error}; a file with certificates in PEM is expected"
        ) from error


def _watched_authorities(ca_file: Path, tls: ssl.SSLContext) -> Watched[bytes]:
    """Returns the content of `ca_file`, to be read again once it changes: an authority that was added then counts in `tls`.

    One that was removed counts on: a context cannot forget it.
    """

    def read() -> bytes:
        content = ca_file.read_bytes()
        try:
            tls.load_verify_locations(ca_file)
        except OSError as error:  # as of a file that is half written
            raise ValueError(
                f"ca_file = {str(ca_file.absolute())!r} cannot be read as certificates in PEM: {error}"
            ) from error
        return content

    return Watched(f"the authorities in {ca_file.absolute()}", read)


def _headers_with(token: str | None) -> Mapping[str, str]:
    # So that Content-Length is the length of the body as read; log-probabilities and routed experts hardly compress anyway.
    headers = {"Accept-Encoding": "identity"}
    return headers if token is None else headers | {"Authorization": f"Bearer {token}"}


async def call(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes | None,
    further_headers: Mapping[str, str] | None = None,
    on_accepted: Callable[[], None] | None = None,
) -> bytes | memoryview:
    """POSTs `body`, which is JSON, or GETs if there is none, and returns the body of a 200.

    `on_accepted` is called when a 200 begins, which may be before its body comes.

    Raises `ServerUnreachable` if the connection fails, `RequestRefused` if the server will never serve this, else
    `ServerFailure`.
    """
    method, headers = ("GET", {}) if body is None else ("POST", {"Content-Type": "application/json"})
    headers |= further_headers or {}
    try:
        async with session.request(method, url, data=body, headers=headers, allow_redirects=False) as response:
            if response.status == HTTPStatus.OK:
                if on_accepted is not None:
                    on_accepted()
                return await _read(response, MAX_RESPONSE_BYTES)
            raise failure_of(url, response.status, await response.content.read(ERROR_BYTES))
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
        raise ServerUnreachable(f"{url}: {_reason(error)}") from error
    except aiohttp.ClientError as error:
        raise ServerFailure(f"{url}: {str(error) or type(error).__name__}") from error


def _reason(error: Exception) -> str:
    """Returns what went wrong, for people: of a connection that is refused, aiohttp's text repeats the address twice."""
    refused = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else None
    if isinstance(refused, ConnectionRefusedError):
        return NOTHING_LISTENS
    if isinstance(refused, ConnectionError) and refused.errno:
        return f"no connection: {os.strerror(refused.errno)}"
    return str(error) or type(error).__name__


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes | memoryview:
    if response.content_length is None or "Content-Encoding" in response.headers:
        return await _read_to_the_end(response, limit)
    if response.content_length > limit:
        raise ServerFailure(f"{response.url} announces {response.content_length} bytes; at most {limit} are read")
    # Filled as it arrives: to join the pieces at the end would hold the loop for a millisecond for every 2 MB.
    body = np.empty(response.content_length, dtype=np.uint8).data
    filled = 0
    async for chunk in response.content.iter_any():
        body[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    return body


async def _read_to_the_end(response: aiohttp.ClientResponse, limit: int) -> bytes:
    chunks: list[bytes] = []
    length = 0
    async for chunk in response.content.iter_any():
        length += len(chunk)
        if length > limit:
            raise ServerFailure(f"{response.url} sends more than {limit} bytes")
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
