"""A stranger's request has a bounded head and a deadline at each HTTP server of ours, before its token is looked at.

Those of vLLM's are in `tests/inference/plugin/test_connection.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.gateway import Gateway
from counterpoint.environments.scripted import ScriptedModel
from counterpoint.transport.http.listening import listening
from counterpoint.transport.telemetry.endpoint import MetricsEndpoint
from counterpoint.transport.telemetry.metric import Process
from tests.serve.api_client import app_of

MOST_BYTES = 8 << 20
"""Far more than any of them takes."""

SECONDS = 0.1


@asynccontextmanager
async def gateway(directory: Path) -> AsyncIterator[int]:
    served = Gateway()
    try:
        async with served.session(ScriptedModel(Chat.__new__(Chat), [])) as session:
            yield int(session.base_url.split(":")[2].partition("/")[0])
    finally:
        await served.close()


@asynccontextmanager
async def page(directory: Path) -> AsyncIterator[int]:
    async with listening(app_of(directory), "127.0.0.1", 0, None) as port:
        yield port


@asynccontextmanager
async def metrics(directory: Path) -> AsyncIterator[int]:
    with MetricsEndpoint(0, Process("test", "test", "A process.", {}, ())) as endpoint:
        yield endpoint.port


Server = Callable[[Path], AbstractAsyncContextManager[int]]
SERVERS = pytest.mark.parametrize("server", [gateway, page, metrics])


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "counterpoint.environments.gateway.server.HEAD_SECONDS",
        "counterpoint.transport.http.listening.IDLE_SECONDS",
        "counterpoint.transport.telemetry.endpoint.REQUEST_SECONDS",
    ):
        monkeypatch.setattr(name, SECONDS)


async def sent_until_closed(port: int, first: bytes, again: bytes, pause: float) -> int:
    """Sends until the server closes the connection; returns how many bytes that took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    closed, count = asyncio.create_task(reader.read()), len(first)
    writer.write(first)
    with suppress(ConnectionError):
        while not closed.done() and count < MOST_BYTES:
            writer.write(again)
            count += len(again)
            await writer.drain()
            await asyncio.sleep(pause)
    with suppress(ConnectionError):
        await closed
    writer.close()
    return count


@SERVERS
@pytest.mark.parametrize("again", [b"x", b"X: y\r\n"], ids=["one line", "lines"])
@pytest.mark.parametrize("first", [b"GET /", b"GET / HTTP/1.1\r\nX: "], ids=["url", "header"])
async def test_a_head_without_end_is_not_taken(tmp_path: Path, server: Server, first: bytes, again: bytes) -> None:
    async with server(tmp_path) as port, asyncio.timeout(60):
        assert await sent_until_closed(port, first, again * 1000, 0.0) < MOST_BYTES


@SERVERS
@pytest.mark.parametrize(
    ("first", "again"),
    [(b"", b""), (b"GET / HTTP/1.1\r\nX: ", b"x"), (b"GET / HTTP/1.1\r\n", b"X: y\r\n"), (b"", b"G")],
    ids=["silent", "byte by byte", "line by line", "method"],
)
@pytest.mark.usefixtures("_soon")
async def test_a_head_that_does_not_end_in_time_is_closed(
    tmp_path: Path, server: Server, first: bytes, again: bytes
) -> None:
    async with server(tmp_path) as port, asyncio.timeout(60):
        await sent_until_closed(port, first, again, SECONDS / 10)
