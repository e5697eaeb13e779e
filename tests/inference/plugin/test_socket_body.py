"""Weights whose bytes a thread takes from the connection's socket, under a real uvicorn: whole, or nothing is left of them."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from counterpoint.inference.base import WeightUpdate
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.plugin import receiving
from counterpoint.inference.plugin.receiving import WeightReceiver
from counterpoint.inference.plugin.socket_body import PIPE_BYTES, BoundedConnection, SocketBody, connection_of
from counterpoint.inference.sent_weights import OFFER_PATH, SEND_PATH, WeightOffer
from counterpoint.transport.files.atomic import STABLE
from tests.inference.test_tls import Identity, make_identity
from tests.support.fake_inference import CLAIM, weight_update
from tests.support.polling import until

FILES = {
    "model-1.safetensors": os.urandom(3 * PIPE_BYTES + 17),
    "model-2.safetensors": b"",
    "model-3.safetensors": b"few",
}
OFFER = WeightOffer(3, None, CLAIM, {name: len(content) for name, content in FILES.items()})
BODY = OFFER.preamble() + b"".join(FILES.values())


@pytest.fixture
async def port(memory: Path, tmp_path: Path) -> AsyncIterator[int]:
    async with serving(tmp_path) as port:
        yield port


@asynccontextmanager
async def serving(tmp_path: Path, identity: Identity | None = None) -> AsyncIterator[int]:
    """Yields the port of a server that answers whether the files have come as they were sent, and whether all of it by ASGI."""
    (tmp_path / "model").mkdir()
    save_file({"a": np.zeros((10, 10), np.float32)}, tmp_path / "model" / "model.safetensors")
    receiver, app = WeightReceiver(tmp_path / "model"), FastAPI()

    @app.post(OFFER_PATH)
    async def offer(request: Request) -> dict[str, object]:
        held = await receiver.consider(WeightOffer.decode(await request.body()))
        return {"holds": sorted(held)}

    @app.post(SEND_PATH)
    async def send(request: Request) -> JSONResponse:
        by_asgi = 0

        async def stream() -> AsyncIterator[bytes]:
            nonlocal by_asgi
            async for piece in request.stream():
                by_asgi += len(piece)
                yield piece

        try:
            _, received = await receiver.receive(stream(), connection_of(request.scope))
        except (OSError, ValueError) as error:
            return JSONResponse(str(error), 422 if isinstance(error, ValueError) else 503)
        same = all((received.path / name).read_bytes() == content for name, content in FILES.items())
        received.remove()
        return JSONResponse({"same": same, "by_asgi": by_asgi >= len(BODY)})

    tls: dict[str, Any] = {}
    if identity is not None:
        tls = {"ssl_certfile": identity.certificate, "ssl_keyfile": identity.key}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, http=BoundedConnection, log_level="warning", **tls))
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve([listening]))
            yield listening.getsockname()[1]
            server.should_exit = True


def left_in(memory: Path) -> list[Path]:
    return list(memory.iterdir())


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


def head(length: str) -> bytes:
    return f"POST {SEND_PATH} HTTP/1.1\r\nHost: server\r\n{length}\r\n\r\n".encode()


@pytest.fixture
def update(tmp_path: Path) -> WeightUpdate:
    directory = tmp_path / "step_3"
    directory.mkdir()
    for name, content in FILES.items():
        (directory / name).write_bytes(content)
    (directory / STABLE).touch()
    return replace(weight_update(3), directory=directory)


async def test_a_client_sends_files_that_never_pass_the_event_loop(
    memory: Path, port: int, update: WeightUpdate
) -> None:
    """Twice, since the connection of the first ends with its answer."""
    async with HttpSessions(PoolConfig(send_weights=True)) as sessions:
        sender = sessions.weight_sender(f"http://127.0.0.1:{port}")
        assert sender is not None
        for _ in range(2):
            assert await sender.send(update, CLAIM) == b'{"same":true,"by_asgi":false}'
    assert left_in(memory) == []


async def test_what_is_encrypted_comes_by_asgi(memory: Path, update: WeightUpdate, tmp_path: Path) -> None:
    """The socket's bytes are not those of the body."""
    identity = make_identity(tmp_path / "authority")
    config = PoolConfig(send_weights=True, ca_file=identity.certificate)
    async with serving(tmp_path, identity) as port, HttpSessions(config) as sessions:
        sender = sessions.weight_sender(f"https://127.0.0.1:{port}")
        assert sender is not None
        assert await sender.send(update, CLAIM) == b'{"same":true,"by_asgi":true}'
    assert left_in(memory) == []


async def test_the_answer_closes_the_connection(port: int) -> None:
    """The parser has not seen where the body ends, and what follows would not be read as a request."""
    async with connected(port) as (reader, writer):
        writer.write(head(f"Content-Length: {len(BODY)}") + BODY)
        answer = await reader.read()
    assert b"HTTP/1.1 200 OK" in answer
    assert b"connection: close" in answer


@pytest.mark.parametrize("more", [-1, 1])
async def test_a_length_that_is_not_that_of_the_offer_is_refused(memory: Path, port: int, more: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(head(f"Content-Length: {len(BODY) + more}") + (BODY + b"!")[: len(BODY) + more])
        answer = await reader.readuntil(b'"')
    assert (b" 422 " if more > 0 else b" 503 ") in answer
    assert left_in(memory) == []


async def test_a_body_in_chunks_comes_by_asgi(memory: Path, port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(head("Transfer-Encoding: chunked") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert b" 200 " in await reader.readuntil(b"\r\n")
        assert b'{"same":true,"by_asgi":true}' in await reader.readuntil(b"}")
    assert left_in(memory) == []


@pytest.mark.parametrize("came", [10, len(OFFER.preamble()), len(OFFER.preamble()) + 100_000, len(BODY) - 1])
async def test_a_client_that_hangs_up_or_falls_silent_leaves_nothing(
    memory: Path, port: int, came: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(port) as (_, writer):
        writer.write(head(f"Content-Length: {len(BODY)}") + BODY[:came])
        await writer.drain()
    monkeypatch.setattr(receiving, "SILENT_SECONDS", 0.05)
    async with connected(port) as (reader, writer):
        writer.write(head(f"Content-Length: {len(BODY)}") + BODY[:came])
        assert b" 503 " in await reader.readuntil(b"\r\n")
    await until(lambda: left_in(memory) == [], "nothing to be left")


async def test_a_write_that_is_cancelled_has_ended(tmp_path: Path) -> None:
    """Its thread writes nothing after it, though the client is there and silent."""
    ours, client = socket.socketpair()
    ours.setblocking(False)
    with client, SocketBody(b"", ours, 600.0) as body:
        client.sendall(b"begun")
        writing = asyncio.create_task(body.write(path := tmp_path / "file", 10))
        await until(lambda: path.exists() and path.read_bytes() == b"begun", "what was sent")
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert client.recv(1) == b""
        assert path.read_bytes() == b"begun"


async def test_the_body_of_a_request_is_never_taken_for_that_of_the_one_before(
    memory: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request comes whole while there is a search for room for the first."""
    offer = WeightOffer(3, None, CLAIM, {"model-1.safetensors": 1000})
    body = offer.preamble() + bytes(1000)
    check, complete, searches, may_go_on, messages = (
        WeightReceiver.check,
        BoundedConnection.on_message_complete,
        [],
        Event(),
        [],
    )

    def slow_check(self: WeightReceiver, offer: WeightOffer, coming: int) -> Path:
        searches.append(offer)
        assert may_go_on.wait(60)
        return check(self, offer, coming)

    def counted(self: BoundedConnection) -> None:
        messages.append(self)
        complete(self)

    monkeypatch.setattr(WeightReceiver, "check", slow_check)
    monkeypatch.setattr(BoundedConnection, "on_message_complete", counted)
    monkeypatch.setattr(sys.modules[__name__], "FILES", {"model-1.safetensors": bytes(1000)})
    async with connected(port) as (reader, writer):
        request = head(f"Content-Length: {len(body)}") + body
        writer.write(request[:-500])
        await until(lambda: bool(searches), "the search for room")
        writer.write(request[-500:] + request)
        await until(lambda: len(messages) == 2, "both requests")
        may_go_on.set()
        answers = await reader.read()
    _, first, second = answers.split(b"HTTP/1.1 ")
    assert first.startswith(b"503 ")
    assert b'"same":true' in second
    assert left_in(memory) == []


async def test_a_file_system_that_takes_nothing_from_a_pipe_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splice = os.splice

    def refused(source: int, target: int, nbytes: int) -> int:
        if os.path.isfile(f"/proc/self/fd/{target}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return splice(source, target, nbytes)

    monkeypatch.setattr(os, "splice", refused)
    ours, client = socket.socketpair()
    ours.setblocking(False)
    content = os.urandom(200_000)
    with client, SocketBody(content[:7], ours, 600.0) as body:
        sending = asyncio.create_task(asyncio.to_thread(client.sendall, content[7:]))
        await body.write(tmp_path / "file", len(content))
        await sending
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=4), came=st.integers(0, 900), pieces=st.integers(1, 300)
)
@settings(deadline=None)
def test_files_are_what_was_sent_however_it_comes(sizes: list[int], came: int, pieces: int) -> None:
    """Any part of it may have come before, which may hold several files and a part of the next."""
    content = bytes(index % 251 for index in range(sum(sizes)))

    async def move(directory: Path) -> list[bytes]:
        ours, client = socket.socketpair()
        ours.setblocking(False)
        with client, SocketBody(content[:came], ours, 600.0) as body:

            def send() -> None:
                for start in range(came, len(content), pieces):
                    client.sendall(content[start : start + pieces])

            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.to_thread(send))
                for index, nbytes in enumerate(sizes):
                    await body.write(directory / str(index), nbytes)
        return [(directory / str(index)).read_bytes() for index in range(len(sizes))]

    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(move(Path(directory)))
    assert [len(each) for each in found] == sizes
    assert b"".join(found) == content
