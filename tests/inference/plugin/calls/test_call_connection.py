"""Many calls by one connection, from our client to our side of a real uvicorn: answers, aborts, ends, and hostile clients."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from counterpoint.inference.base import RequestRefused, ServerFailure, ServerUnreachable
from counterpoint.inference.call_frames import (
    ABORT,
    ABORTED,
    CALL,
    CALLS_PATH,
    MOST_ANSWER_BYTES,
    MOST_CALLS,
    UPGRADE,
    FrameSplitter,
)
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.clients.many_calls import ManyCalls
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.plugin.authentication import PlainBodies, RequireToken
from counterpoint.inference.plugin.calls import call_connection
from counterpoint.inference.plugin.calls.call_connection import take_calls
from counterpoint.inference.plugin.socket_body import BoundedConnection
from tests.inference.test_tls import make_identity
from tests.support.polling import until

PATH = "/counterpoint/v1/generate"
MOST_BYTES = 1 << 20
ASK = f"GET {CALLS_PATH} HTTP/1.1\r\nHost: server\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n\r\n".encode()


def frame(number: int, kind: int, body: bytes = b"") -> bytes:
    return struct.pack("<IHI", number, kind, len(body)) + body


class Served:
    """A server whose calls are answered by their words: `wait` waits for `gate`; `raise`, `long` and `503` are what they say."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.calls = 0
        self.running = 0
        self.ended: list[bytes] = []
        self.posts = 0
        self.server: uvicorn.Server
        self.port = 0

    async def answer(self, body: bytes) -> tuple[int, bytes]:
        self.calls += 1
        self.running += 1
        try:
            if body.startswith(b"wait"):
                await self.gate.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.001)  # as the engine's own abort takes
            self.ended.append(body)
            raise
        finally:
            self.running -= 1
        if body == b"raise":
            raise KeyError("unexpected")
        if body == b"value":
            raise ValueError("bad value")
        if body.isdigit():
            return int(body), b'{"error":"so it was told"}'
        return 200, bytes(MOST_ANSWER_BYTES + (body == b"too long")) if body.endswith(b"long") else body[::-1]

    @property
    def ends(self) -> bool:
        return any(getattr(each, "_ends", False) for each in self.server.server_state.connections)

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)


@asynccontextmanager
async def serving(served: Served, *middleware: Any, takes: bool = True, **options: Any) -> AsyncIterator[Served]:
    app = FastAPI()

    async def calls(request: Request) -> Response:
        return take_calls(request, served.answer, MOST_BYTES)

    async def post(request: Request) -> Response:
        served.posts += 1
        status, body = await served.answer(await request.body())
        return Response(body, status)

    async def bad_value(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    if takes:
        app.add_api_route(CALLS_PATH, calls, methods=["GET"])
    app.add_api_route(PATH, post, methods=["POST"])
    app.exception_handler(ValueError)(bad_value)
    for each in middleware:
        app.add_middleware(each)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        served.server = uvicorn.Server(uvicorn.Config(app, http=BoundedConnection, log_level="error", **options))
        served.port = listening.getsockname()[1]
        async with asyncio.TaskGroup() as group:
            group.create_task(served.server.serve([listening]))
            await until(lambda: served.server.started, "the server")
            yield served
            served.server.should_exit = True


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(Served()) as served:
        yield served


@asynccontextmanager
async def client_of(served: Served, config: PoolConfig | None = None, scheme: str = "http") -> AsyncIterator[ManyCalls]:
    async with HttpSessions(config or PoolConfig()) as sessions:
        yield sessions.many_calls(sessions.binary_client(f"{scheme}://127.0.0.1:{served.port}"))


async def ask(calls: ManyCalls, body: bytes) -> bytes:
    return bytes(await calls.post(PATH, body, "application/octet-stream"))


@asynccontextmanager
async def stranger(
    served: Served, receive_bytes: int = 0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that carries calls, whose client sends what a test says."""
    connected = socket.socket()
    if receive_bytes:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connected.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connected, ("127.0.0.1", served.port))
    reader, writer = await asyncio.open_connection(sock=connected, limit=1 << 16)
    writer.write(ASK)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    yield reader, writer
    writer.close()


async def frames_of(reader: asyncio.StreamReader, count: int) -> list[tuple[int, int, bytes]]:
    splitter, found = FrameSplitter(1 << 22), list[tuple[int, int, bytes]]()
    while len(found) < count and (data := await reader.read(1 << 16)):
        found += splitter.split(data)
    return found


async def test_many_calls_share_a_connection(served: Served) -> None:
    async with client_of(served) as calls:
        bodies = [f"call {number}".encode() for number in range(100)]
        assert await asyncio.gather(*(ask(calls, body) for body in bodies)) == [body[::-1] for body in bodies]
        assert (served.connections, served.posts) == (1, 0)
        assert len(await ask(calls, b"long")) == MOST_ANSWER_BYTES
        assert await ask(calls, bytes(MOST_BYTES)) == bytes(MOST_BYTES)
        assert served.posts == 0
        assert len(await ask(calls, bytes(MOST_BYTES + 1))) == MOST_BYTES + 1
        assert served.posts == 1
    await until(lambda: not served.connections, "the end of the connection")


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b"400", RequestRefused, "answered 400: so it was told"),
        (b"413", RequestRefused, "answered 413: so it was told"),
        (b"404", ServerFailure, "answered 404: so it was told"),
        (b"503", ServerFailure, "answered 503: so it was told"),
        (b"value", RequestRefused, "answered 400: bad value"),
        (b"raise", ServerFailure, "answered 500: Internal Server Error"),
        (b"too long", RequestRefused, "answered 400: the answer is too long"),
    ],
)
async def test_a_call_that_fails_fails_alone(served: Served, body: bytes, kind: type[Exception], said: str) -> None:
    async with client_of(served) as calls:
        other = asyncio.create_task(ask(calls, b"wait"))
        with pytest.raises(kind, match=said):
            await ask(calls, body)
        served.gate.set()
        assert await other == b"tiaw"
        assert (served.connections, served.posts) == (1, 0)


async def test_a_cancelled_call_ends_at_the_server_and_no_other(served: Served) -> None:
    async with client_of(served) as calls:
        kept, *cancelled = [asyncio.create_task(ask(calls, b"wait %d" % number)) for number in range(10)]
        await until(lambda: served.running == 10, "the calls")
        for each in cancelled:
            each.cancel()
        await until(lambda: len(served.ended) == 9, "their ends")
        early = asyncio.create_task(ask(calls, b"wait early"))
        await asyncio.sleep(0)
        early.cancel()
        served.gate.set()
        assert await kept == b"0 tiaw"
        assert await ask(calls, b"on") == b"no"
        assert served.running == 0
        assert served.connections == 1


async def test_a_client_that_is_gone_ends_its_calls(served: Served) -> None:
    async with stranger(served) as (_, writer):
        writer.write(b"".join(frame(number, CALL, b"wait") for number in range(5)))
        await until(lambda: served.calls == 5, "the calls")
        writer.write(frame(3, ABORT) + frame(3, ABORT))
    await until(lambda: len(served.ended) == 5, "their ends")
    await until(lambda: not served.connections, "the end of the connection")


async def test_an_aborted_call_is_answered_once(served: Served) -> None:
    async with stranger(served) as (reader, writer):
        writer.write(
            frame(1, CALL, b"wait") + frame(1, ABORT) + frame(1, ABORT) + frame(9, ABORT) + frame(2, CALL, b"on")
        )
        assert sorted(await frames_of(reader, 2)) == [(1, ABORTED, b""), (2, 200, b"no")]
        writer.write(frame(1, CALL, b"again"))
        assert await frames_of(reader, 1) == [(1, 200, b"niaga")]


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (frame(1, CALL, b"wait") * 2, "number 1, which is none or in use"),
        (frame(1, 7, b"x"), "a frame of kind 7"),
        (struct.pack("<IHI", 5, CALL, MOST_BYTES + 1), r"announces 1048577 bytes of call 5; at most 1048576"),
        (b"".join(frame(number, CALL, b"wait") for number in range(MOST_CALLS + 1)), "makes more than 16384 calls"),
        (b"GET / HTTP/1.1\r\nHost: server\r\n\r\n", "announces"),
    ],
    ids=["number", "kind", "length", "calls", "http"],
)
async def test_what_is_no_frame_ends_the_connection(
    served: Served, sent: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with stranger(served) as (reader, writer):
            writer.write(sent)
            with suppress(ConnectionError):
                await reader.read()
            await until(lambda: not served.running, "the end of its calls")
    await until(lambda: not served.connections, "the end of the connection")
    assert "Cut a connection of model calls: its client" in caplog.text
    assert re.search(said, caplog.text)


async def test_no_more_is_read_of_a_client_that_does_not_read(served: Served) -> None:
    count = 40
    async with stranger(served, receive_bytes=1 << 14) as (reader, writer):
        for number in range(count):
            writer.write(frame(number, CALL, b"long" if number < 5 else b"x" * (MOST_BYTES - 4) + b"long"))
        await until(lambda: served.calls >= 5, "the first calls")
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert served.calls < count, "all are held at once"
        answers = await frames_of(reader, count)
        assert sorted(number for number, _, _ in answers) == list(range(count))


@pytest.mark.parametrize("sent", [frame(1, CALL, b"long") * 1, frame(1, CALL, b"half")[:-2]], ids=["reads", "sends"])
async def test_a_client_that_does_nothing_more_is_cut(
    sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(call_connection, "BODY_SECONDS", 0.02)
    async with serving(Served()) as served:
        async with stranger(served, receive_bytes=1 << 14) as (_, writer):
            writer.write(sent)
            await until(lambda: not served.connections, "the end of the connection")
        assert "takes or sends nothing for 0.02 s" in caplog.text
        async with client_of(served) as calls:
            waits = asyncio.create_task(ask(calls, b"wait"))
            await until(lambda: served.running == 1, "the call")
            await asyncio.sleep(0.1)
            served.gate.set()
            assert await waits == b"tiaw", "a connection that waits for the server is not late"


async def test_what_is_left_unread_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(call_connection, "MOST_UNSENT_BYTES", 5 * MOST_ANSWER_BYTES)
    async with serving(Served()) as served, stranger(served, receive_bytes=1 << 14) as (_, writer):
        writer.write(b"".join(frame(number, CALL, b"wait long") for number in range(20)))
        await until(lambda: served.running == 20, "the calls")
        served.gate.set()
        await until(lambda: not served.connections, "the end of the connection")
    assert "leaves 10485760 bytes unread" in caplog.text


async def test_a_server_that_ends_answers_what_it_has_and_takes_nothing_new() -> None:
    async with serving(Served()) as served, client_of(served) as calls:
        waits = asyncio.create_task(ask(calls, b"wait"))
        await until(lambda: served.running == 1, "the call")
        served.server.should_exit = True
        await until(lambda: served.ends, "the end")
        with pytest.raises(ServerFailure, match="answered 503: the server shuts down"):
            await ask(calls, b"new")
        served.gate.set()
        assert await waits == b"tiaw"
        await until(lambda: not served.connections, "the end of the connection")
        with pytest.raises(ServerUnreachable):
            await ask(calls, b"new")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (ASK.replace(UPGRADE.encode(), b"h2c"), 426),
        (ASK.replace(b"Connection: Upgrade\r\n", b"Content-Length: 3\r\n"), 400),
        (f"GET {CALLS_PATH} HTTP/1.1\r\nHost: server\r\n\r\n".encode(), 426),
    ],
    ids=["another", "body", "none"],
)
async def test_what_asks_for_no_such_connection_gets_none(served: Served, request_: bytes, status: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(request_)
    assert (await reader.readuntil(b"\r\n")).split()[1] == b"%d" % status
    writer.close()


def write(path: Path, tokens: str) -> None:
    path.write_text(tokens)
    path.chmod(0o600)


@pytest.fixture
def token_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "token"
    write(path, "right\n")
    monkeypatch.setenv("COUNTERPOINT_API_KEY_FILE", str(path))
    monkeypatch.setattr("counterpoint.transport.files.watched.LOOK_SECONDS", 0.0)
    return path


async def test_each_call_needs_a_token_that_is_taken_now(token_file: Path, tmp_path: Path) -> None:
    async with serving(Served(), PlainBodies, RequireToken) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(ASK)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401 ")
        writer.close()
        write(given := tmp_path / "given", "right\n")
        async with client_of(served, PoolConfig(api_key_file=given)) as calls:
            assert await ask(calls, b"call") == b"llac"
            assert served.posts == 0
            write(token_file, "new\n")
            with pytest.raises(ServerFailure, match="answered 401: a valid bearer token is required"):
                await ask(calls, b"call")
            assert served.calls == 1


async def test_a_new_token_has_a_new_connection(token_file: Path, tmp_path: Path) -> None:
    async with serving(Served(), PlainBodies, RequireToken) as served:
        write(given := tmp_path / "given", "right\n")
        async with HttpSessions(PoolConfig(api_key_file=given)) as sessions:
            calls = sessions.many_calls(sessions.binary_client(f"http://127.0.0.1:{served.port}"))
            waits = asyncio.create_task(ask(calls, b"wait"))
            await until(lambda: served.running == 1, "the call")
            write(token_file, "new\nright\n")
            write(given, "new\n")
            assert sessions._tokens is not None
            sessions._tokens.refresh(now=True)
            assert await ask(calls, b"call") == b"llac"
            assert served.connections == 2
            served.gate.set()
            assert await waits == b"tiaw"
            await until(lambda: served.connections == 1, "the end of the former connection")
            assert served.posts == 0


@pytest.mark.slow
async def test_calls_are_encrypted(tmp_path: Path) -> None:
    identity = make_identity(tmp_path / "authority")
    config = PoolConfig(ca_file=identity.certificate)
    served = Served()
    tls: dict[str, Any] = {"ssl_certfile": identity.certificate, "ssl_keyfile": identity.key}
    async with serving(served, **tls), client_of(served, config, "https") as calls:
        answers = await asyncio.gather(*(ask(calls, b"%d long" % each) for each in range(20)))
        assert answers == [bytes(MOST_ANSWER_BYTES)] * 20
        assert (served.connections, served.posts) == (1, 0)


async def test_a_server_that_takes_none_is_asked_by_posts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with serving(Served(), takes=False) as served, client_of(served) as calls:
            assert await asyncio.gather(*(ask(calls, b"call") for _ in range(10))) == [b"llac"] * 10
            assert served.posts == 10
            assert await ask(calls, b"call") == b"llac"
    assert caplog.text.count("takes no connection that carries many calls") == 1
    assert "404 Not Found" in caplog.text
