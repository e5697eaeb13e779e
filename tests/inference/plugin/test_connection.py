"""What a stranger may send to a server of vLLM before its token is looked at, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import itertools
import socket
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn

from counterpoint.inference.plugin import socket_body
from counterpoint.inference.plugin.socket_body import HEAD_BYTES, BoundedConnection
from tests.support.polling import until

CHUNKED = b"POST / HTTP/1.1\r\nHost: server\r\nTransfer-Encoding: chunked\r\n\r\n"
SHORT = b"GET / HTTP/1.1\r\nHost: server\r\n\r\n"
LONG = b"GET /long HTTP/1.1\r\nHost: server\r\n\r\n"
EARLY = b"POST /early HTTP/1.1\r\nHost: server\r\nContent-Length: 1\r\n\r\n"
LONG_BYTES = 4 << 20
"""Far more than the kernel takes of an answer here."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers a request with the length of its body, once it has come; `LONG` with as many bytes as it says.

    The head of `EARLY`'s answer comes before.
    """
    if scope["path"] == "/long":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LONG_BYTES)]})
        await send({"type": "http.response.body", "body": b"x" * LONG_BYTES})
        return
    if scope["path"] == "/early":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
    length, more = 0, scope["type"] == "http"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length, more = length + len(message["body"]), message["more_body"]
    if scope["path"] != "/early":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
    await send({"type": "http.response.body", "body": b"%9d" % length})


@pytest.fixture
async def server() -> AsyncIterator[uvicorn.Server]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        config = uvicorn.Config(app, http=BoundedConnection, log_level="error", lifespan="off", timeout_keep_alive=3600)
        serving = uvicorn.Server(config)
        async with asyncio.TaskGroup() as group:
            group.create_task(serving.serve([listening]))
            await until(lambda: serving.started, "the server")
            yield serving
            serving.should_exit = True


async def connected(server: uvicorn.Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head.split()[1] + b" " + (await reader.readexactly(9)).strip()


def endless(*words: bytes) -> Iterator[bytes]:
    *first, again = words
    return itertools.chain(first, itertools.repeat(again * 1000))


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (endless(b"GET / HTTP/1.1\r\nX: ", b"x"), b"431"),
        (endless(b"GET / HTTP/1.1\r\n", b"X: y\r\n"), b"431"),
        (endless(b"GET /", b"x"), b"431"),
        (endless(b"GET / HTTP/1.1\r\n", b"x"), b"431"),
        (endless(b"x"), b"400"),
        (endless(SHORT, b"GET / HTTP/1.1\r\nX: ", b"x"), b"200"),
        ([b"GET / HTTP/1.1\r\nX: " + b"x" * HEAD_BYTES + b"\r\n\r\n"], b"431"),
        (endless(CHUNKED + b"1;x=", b"x"), b""),
        (endless(CHUNKED + b"0\r\nX: ", b"x"), b""),
        (endless(CHUNKED + b"0\r\n", b"X: y\r\n"), b""),
    ],
    ids=["value", "lines", "url", "name", "no HTTP", "second", "at once", "extension", "trailer", "trailers"],
)
async def test_a_head_without_end_is_refused_before_it_takes_memory(
    server: uvicorn.Server, sent: Iterator[bytes], status: bytes
) -> None:
    reader, writer = await connected(server)
    count = 0
    try:
        for piece in sent:
            writer.write(piece)
            await writer.drain()
            count += len(piece)
            assert count < 64 * HEAD_BYTES, "it was taken"
            if reader.at_eof():
                break
            await asyncio.sleep(0)
    except ConnectionError:
        pass
    try:
        said = await reader.read()
    except ConnectionError:
        said = b""  # what was still under way made the kernel reset the connection
    writer.close()
    assert said[9:12] in (status, b"")
    await until(lambda: not server.server_state.connections, "its end")
    reader, writer = await connected(server)
    writer.write(SHORT)
    assert await answer(reader) == b"200 0"
    writer.close()


@pytest.mark.parametrize(
    ("first", "trickle"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\n", b"X: y\r\n"),
        (SHORT, b""),
        (SHORT, b"X"),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n1", b""),
        (CHUNKED + b"5\r\n1", b""),
    ],
    ids=["silent", "head by bytes", "after an answer", "head by bytes after an answer", "body", "chunk"],
)
async def test_a_client_that_does_not_go_on_is_closed(
    server: uvicorn.Server, monkeypatch: pytest.MonkeyPatch, first: bytes, trickle: bytes
) -> None:
    for name in ("HEAD_SECONDS", "BODY_SECONDS", "GRACE_SECONDS"):
        monkeypatch.setattr(socket_body, name, 0.05)
    reader, writer = await connected(server)
    writer.write(first)

    async def go_on() -> None:
        while trickle and not writer.is_closing():
            writer.write(trickle)
            await asyncio.sleep(0.01)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        going_on = group.create_task(go_on())
        try:
            await reader.read()
        except ConnectionError:
            pass
        going_on.cancel()
    await until(lambda: not server.server_state.connections, "its end")
    writer.close()


@pytest.mark.slow
async def test_who_sends_in_time_is_answered_however_long_it_takes(
    server: uvicorn.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body may take longer than the deadline for a head, and an idle connection is used again."""
    for name in ("HEAD_SECONDS", "GRACE_SECONDS"):
        monkeypatch.setattr(socket_body, name, 0.5)
    reader, writer = await connected(server)
    for _ in range(2):
        writer.write(b"POST / HTTP/1.1\r\nX: " + b"y" * 60_000 + b"\r\nContent-Length: 300000\r\n\r\n")
        for _ in range(30):
            writer.write(b"x" * 10_000)
            await asyncio.sleep(0.03)
        assert await answer(reader) == b"200 300000"
    writer.write(CHUNKED + b"1\r\nx\r\n" * 50_000 + b"0\r\nX: y\r\n\r\n")
    assert await answer(reader) == b"200 50000"
    writer.close()


@pytest.mark.slow
async def test_a_long_answer_arrives_however_slowly_it_is_read(
    server: uvicorn.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEAD_SECONDS", "GRACE_SECONDS"):
        monkeypatch.setattr(socket_body, name, 0.5)
    reader, writer = await connected(server)
    writer.write(LONG)
    await reader.readuntil(b"\r\n\r\n")
    for _ in range(64):
        await reader.readexactly(LONG_BYTES // 64)
        await asyncio.sleep(0.02)
    writer.write(SHORT)
    assert await answer(reader) == b"200 0"
    writer.close()


@pytest.mark.parametrize("trickle", [b"", b"x"])
async def test_a_client_that_takes_no_answer_is_closed(
    server: uvicorn.Server, monkeypatch: pytest.MonkeyPatch, trickle: bytes
) -> None:
    for name in ("HEAD_SECONDS", "BODY_SECONDS", "GRACE_SECONDS"):
        monkeypatch.setattr(socket_body, name, 0.05)
    _, writer = await connected(server)
    writer.write(LONG * 3)
    await until(lambda: bool(server.server_state.connections), "the connection")
    async with asyncio.timeout(60):
        while server.server_state.connections:
            writer.write(trickle)
            await asyncio.sleep(0.01)
    writer.close()


class Counted:
    """A transport that notes how many pieces each of its calls has."""

    def __init__(self, transport: Any, calls: list[int]) -> None:
        self._transport, self._calls = transport, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.writelines([data])

    def writelines(self, pieces: list[bytes]) -> None:
        self._calls.append(len(pieces))
        self._transport.writelines(pieces)


async def test_head_and_body_are_sent_together_unless_the_body_is_late(
    server: uvicorn.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    former = BoundedConnection.connection_made

    def counted(self: BoundedConnection, transport: Any) -> None:
        former(self, Counted(transport, calls))  # type: ignore[arg-type]

    monkeypatch.setattr(BoundedConnection, "connection_made", counted)
    reader, writer = await connected(server)
    writer.write(SHORT)
    assert await answer(reader) == b"200 0"
    assert calls == [2]
    writer.write(EARLY)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200"), "before the request has come whole"
    assert calls == [2, 1]
    writer.write(b"x")
    assert await reader.readexactly(9) == b"        1"
    assert calls == [2, 1, 1]
    writer.close()


async def test_a_client_that_waits_for_a_100_is_told_to_send_its_body(server: uvicorn.Server) -> None:
    reader, writer = await connected(server)
    for _ in range(2):
        writer.write(b"POST / HTTP/1.1\r\nHost: server\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert await answer(reader) == b"200 3"
    writer.close()


async def test_an_answer_without_a_body_is_sent_before_the_next_one(server: uvicorn.Server) -> None:
    reader, writer = await connected(server)
    writer.write(SHORT.replace(b"GET", b"HEAD") + SHORT)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert await answer(reader) == b"200 0"
    writer.close()


async def test_an_answer_without_a_body_survives_a_server_that_ends_in_the_same_turn(
    server: uvicorn.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = BoundedConnection.on_response_complete

    def ended(self: BoundedConnection) -> None:
        former(self)
        self.shutdown()

    monkeypatch.setattr(BoundedConnection, "on_response_complete", ended)
    reader, writer = await connected(server)
    writer.write(SHORT.replace(b"GET", b"HEAD"))
    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_what_is_known_of_a_request_is_freed_without_the_garbage_collector(server: uvicorn.Server) -> None:
    reader, writer = await connected(server)
    gc.disable()
    try:
        writer.write(SHORT)
        assert await answer(reader) == b"200 0"
        (connection,) = server.server_state.connections
        assert isinstance(connection, BoundedConnection)
        answered = weakref.ref(connection.cycle)
        writer.write(SHORT)
        assert await answer(reader) == b"200 0"
        await until(lambda: answered() is None, "the end of what the first request left")
    finally:
        gc.enable()
    writer.close()
