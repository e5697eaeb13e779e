"""One HTTP call: whole bodies however they are sent, and no more of them than the limit."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from counterpoint.inference.base import RequestRefused, ServerFailure, ServerUnreachable
from counterpoint.inference.clients import http_sessions
from counterpoint.inference.clients.http_sessions import HttpSessions, call
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.per_tick_limiter import PerTickLimiter

BODY = bytes(range(256)) * 16384
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.get("/", handler)])
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


async def fetch(handler: Handler) -> bytes:
    async with served(handler) as url, HttpSessions(PoolConfig()) as connections:
        return bytes(await call(connections.data, url, None))


async def announced(request: web.Request) -> web.StreamResponse:
    assert request.headers["Accept-Encoding"] == "identity"
    return web.Response(body=BODY)


async def in_chunks(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    response.enable_chunked_encoding()
    await response.prepare(request)
    for start in range(0, len(BODY), 100_000):
        await response.write(BODY[start : start + 100_000])
    return response


async def compressed(request: web.Request) -> web.StreamResponse:
    return web.Response(body=gzip.compress(BODY), headers={"Content-Encoding": "gzip"})


async def empty(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"")


async def cut_short(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_length = len(BODY)
    await response.prepare(request)
    await response.write(BODY[:1000])
    assert request.transport is not None
    request.transport.close()
    await asyncio.sleep(0)
    return response


@pytest.mark.parametrize("handler", [announced, in_chunks, compressed])
async def test_a_body_is_read_whole(handler: Handler) -> None:
    assert await fetch(handler) == BODY


async def test_an_empty_body() -> None:
    assert await fetch(empty) == b""


async def test_a_body_that_is_cut_short_is_no_answer() -> None:
    with pytest.raises(ServerUnreachable):
        await fetch(cut_short)


@pytest.mark.parametrize("handler", [announced, in_chunks, compressed])
async def test_no_more_than_the_limit_is_read(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_sessions, "MAX_RESPONSE_BYTES", len(BODY) - 1)
    with pytest.raises(ServerFailure, match=rf"{len(BODY) - 1}"):
        await fetch(handler)


@pytest.mark.parametrize(
    ("status", "kind"), [(400, RequestRefused), (401, ServerFailure), (404, ServerFailure), (503, ServerFailure)]
)
async def test_an_error_is_told_in_the_servers_words_and_not_all_of_them(
    status: int, kind: type[ServerFailure] | type[RequestRefused]
) -> None:
    async def fails(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long " * 500}}, status=status)

    with pytest.raises(kind, match=f"answered {status}: too long") as caught:
        await fetch(fails)
    assert len(str(caught.value)) < 1000


async def test_closing_does_not_wait_for_memory() -> None:
    mapped = threading.Event()
    async with HttpSessions(PoolConfig()) as connections:
        mapping = connections._threads.submit(mapped.wait, 60)
    assert not mapping.done()
    mapped.set()


async def test_administration_does_not_queue_behind_model_calls() -> None:
    async def says_its_path(request: web.Request) -> web.StreamResponse:
        return web.Response(text=request.path)

    async with served(says_its_path) as url, HttpSessions(PoolConfig()) as connections:
        model_calls, administration = (
            connections.binary_client(url[:-1], administers=which) for which in (False, True)
        )
        connections._limits.heads = PerTickLimiter(0)  # as while more answers come than a busy loop reads
        waiting = asyncio.create_task(model_calls.get("/", {}))
        assert await administration.get("/", {}) == b"/"
        assert not waiting.done()
        waiting.cancel()
