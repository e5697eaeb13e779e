"""Weights on their way to a server over a real socket: they arrive as they are, whatever happens to server, files or caller."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from io import FileIO
from pathlib import Path

import orjson
import pytest

from counterpoint.inference.base import InferenceError, RequestRefused, ServerFailure, ServerUnreachable, WeightUpdate
from counterpoint.inference.clients import weight_sender
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.clients.weight_sender import WeightSender
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.loads import LoadClaim
from counterpoint.inference.sent_weights import LENGTH_BYTES, OFFER_PATH, SEND_PATH, WeightOffer, opened
from counterpoint.transport.files.atomic import STABLE
from tests.inference.test_tls import Identity, make_identity
from tests.support.fake_inference import CLAIM, weight_update

LARGE = 1 << 24
"""Bytes, more than the buffers of a connection hold."""

Peer = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Handles one request, of which the head was read; gets the head, too."""


@asynccontextmanager
async def sender_to(
    peer: Peer, token: Path | None = None, identity: Identity | None = None, send: bool = True
) -> AsyncIterator[WeightSender]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not reader.at_eof():
                await peer((await reader.readuntil(b"\r\n\r\n")).decode(), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has hung up
        finally:
            writer.close()

    tls, ca_file = (None, None) if identity is None else (identity.context, identity.certificate)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    async with server, HttpSessions(PoolConfig(send_weights=send, api_key_file=token, ca_file=ca_file)) as sessions:
        sender = sessions.weight_sender(f"http{'' if tls is None else 's'}://127.0.0.1:{port}")
        assert sender is not None
        yield sender


async def body_of(head: str, reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int(head.partition("Content-Length: ")[2].partition("\r\n")[0]))


def answer(writer: asyncio.StreamWriter, body: bytes = b'{"holds": []}', status: str = "200 OK") -> None:
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


@pytest.fixture
def update(tmp_path: Path) -> WeightUpdate:
    directory = tmp_path / "step_3"
    directory.mkdir()
    (directory / "model-1.safetensors").write_bytes(bytes(range(256)) * 5000)
    with (directory / "model-2.safetensors").open("wb") as file:
        file.truncate(LARGE)
    (directory / STABLE).touch()
    return replace(weight_update(3), directory=directory)


async def test_files_arrive_as_they_are_though_the_trainer_removes_them(update: WeightUpdate, tmp_path: Path) -> None:
    """Offered, then sent; nothing but bytes and names is said, under the token."""
    token = tmp_path / "token"
    token.write_text("open sesame")
    expected = {path.name: path.read_bytes() for path in sorted(update.directory.glob("*.safetensors"))}
    heads, bodies = [], []

    async def peer(head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        bodies.append(await body_of(head, reader))
        if len(heads) == 1:
            shutil.rmtree(update.directory)
            answer(writer)
        else:
            answer(writer, b"loaded")

    async with sender_to(peer, token) as sender:
        assert await sender.send(update, CLAIM) == b"loaded"
    assert [head.split()[1] for head in heads] == [OFFER_PATH, SEND_PATH]
    assert all("Authorization: Bearer open sesame\r\n" in head for head in heads)
    offer = WeightOffer.decode(bodies[0])
    assert offer == WeightOffer(3, None, CLAIM, {name: len(content) for name, content in expected.items()})
    assert int.from_bytes(bodies[1][:LENGTH_BYTES], "little") == len(bodies[0])
    assert bodies[1] == offer.preamble() + b"".join(expected.values())
    assert not any(str(tmp_path).encode() in body for body in bodies)


async def test_a_refusal_says_why_and_costs_no_transfer(update: WeightUpdate) -> None:
    """The server refuses the offer, or the weights that follow it."""
    paths: list[str] = []

    async def refuse_offer(head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        paths.append(head.split()[1])
        await body_of(head, reader)
        answer(writer, b'{"error": "no room"}', "422 Unprocessable")

    async def refuse_weights(head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await body_of(head, reader)
        if OFFER_PATH in head:
            answer(writer)
        else:
            answer(writer, b'{"error": "these are not weights"}', "422 Unprocessable")

    async with sender_to(refuse_offer) as sender:
        with pytest.raises(RequestRefused, match="answered 422: no room"):
            await sender.send(update, CLAIM)
    assert paths == [OFFER_PATH]
    async with sender_to(refuse_weights) as sender:
        with pytest.raises(RequestRefused, match="answered 422: these are not weights"):
            await sender.send(update, CLAIM)


@pytest.mark.parametrize("secure", [False, True])
async def test_the_reason_of_a_server_that_hangs_up_arrives(update: WeightUpdate, tmp_path: Path, secure: bool) -> None:
    async def peer(head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if OFFER_PATH in head:
            await body_of(head, reader)
            answer(writer)
            return
        await reader.readexactly(1 << 20)
        answer(writer, b'{"error": "the disk is full"}', "507 Insufficient Storage")
        await writer.drain()
        writer.close()
        raise ConnectionAbortedError

    async with sender_to(peer, identity=make_identity(tmp_path / "server") if secure else None) as sender:
        with pytest.raises(ServerFailure, match="answered 507: the disk is full"):
            await sender.send(update, CLAIM)


async def test_a_server_that_falls_silent_or_dies_is_named(
    update: WeightUpdate, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()

    async def silent(head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if OFFER_PATH not in head:
            await ended.wait()
        await body_of(head, reader)
        answer(writer)

    async def dying(head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if OFFER_PATH not in head:
            await reader.readexactly(1 << 20)
            writer.transport.abort()
            raise ConnectionAbortedError
        await body_of(head, reader)
        answer(writer)

    async def never(head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()

    async with sender_to(dying) as sender:
        with pytest.raises(ServerUnreachable, match=r"http://127.*, while version 3 was sent: "):
            await sender.send(update, CLAIM)
    monkeypatch.setattr(weight_sender, "SILENT_SECONDS", 0.1)
    for peer in (silent, never):
        async with sender_to(peer) as sender:
            with pytest.raises(ServerUnreachable, match=r"http://127.* was silent for 0\.1 s while version 3 was sent"):
                await sender.send(update, CLAIM)
            ended.set()
        ended.clear()


async def test_a_caller_that_gives_up_ends_the_transfer(update: WeightUpdate) -> None:
    """While bytes go, and while the server loads: it sees the connection end, and the thread is free."""
    for sent in (1 << 20, LARGE):
        arrived, hung_up = asyncio.Event(), asyncio.Event()

        async def peer(
            head: str,
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            nbytes: int = sent,
            arrived: asyncio.Event = arrived,
            hung_up: asyncio.Event = hung_up,
        ) -> None:
            if OFFER_PATH in head:
                await body_of(head, reader)
                answer(writer)
                return
            await reader.readexactly(nbytes)
            arrived.set()
            while not reader.at_eof():
                await reader.read(1 << 20)
            hung_up.set()

        async with sender_to(peer) as sender:
            task = asyncio.create_task(sender.send(update, CLAIM))
            await arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(60):
                await hung_up.wait()


async def test_files_that_cannot_be_read_are_named(update: WeightUpdate) -> None:
    async def peer(head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (update.directory / "model-2.safetensors").open("r+b") as file:
            file.truncate(7)
        await body_of(head, reader)
        answer(writer)

    async with sender_to(peer) as sender:
        with pytest.raises(RequestRefused, match=r"version 3 cannot be sent: .*model-2\.safetensors lacks "):
            await sender.send(update, CLAIM)
        (update.directory / STABLE).unlink()
        with pytest.raises(RequestRefused, match=r"version 3 cannot be sent: .*no STABLE marker"):
            await sender.send(update, CLAIM)


class Unreadable(FileIO):
    """A file on a disk that fails."""

    number = 0

    def read(self, size: int | None = -1, /) -> bytes:
        raise OSError(self.number, os.strerror(self.number), self.name)


@pytest.mark.parametrize(("number", "final"), [(errno.EMFILE, False), (errno.EIO, False), (errno.EACCES, True)])
@pytest.mark.parametrize("opens", [False, True])
async def test_an_error_of_this_machine_that_may_pass_refuses_nothing(
    update: WeightUpdate, number: int, final: bool, opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def peer(head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await body_of(head, reader)
        answer(writer)

    @contextmanager
    def failing(given: WeightUpdate, claim: LoadClaim) -> Iterator[tuple[WeightOffer, dict[str, FileIO]]]:
        with opened(given, claim) as (offer, files), Unreadable(update.directory / "model-1.safetensors") as file:
            if not opens:
                file.read()
            yield offer, dict.fromkeys(files, file)

    monkeypatch.setattr(Unreadable, "number", number)
    monkeypatch.setattr(weight_sender, "opened", failing)
    async with sender_to(peer) as sender:
        with pytest.raises(InferenceError, match=r"version 3 cannot be sent: .*model-1\.safetensors") as caught:
            await sender.send(update, CLAIM)
    assert isinstance(caught.value, RequestRefused) == final
    assert not isinstance(caught.value, ServerFailure), "no server is to blame"


async def test_what_the_server_holds_of_a_base_is_left_out_once(tmp_path: Path) -> None:
    """A version that is sent again was not proven: it comes whole, unless only its offer failed. A file that is no base always
    comes."""
    files = {"base/model.safetensors": b"weights of version 0", "delta.safetensors": b"changed"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / STABLE).touch()
    sent: list[bytes] = []
    heads: list[str] = []

    async def peer(head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await body_of(head, reader)
        heads.append(head)
        if len(heads) == 1:
            answer(writer, b"", "503 Busy")
            return
        if SEND_PATH in head:
            sent.append(body[LENGTH_BYTES + int.from_bytes(body[:LENGTH_BYTES], "little") :])
        answer(writer, orjson.dumps({"holds": list(files)}))

    async with sender_to(peer) as sender:
        with pytest.raises(ServerFailure, match="answered 503"):
            await sender.send(replace(weight_update(1), directory=tmp_path), CLAIM)
        for version in (1, 1, 2):
            await sender.send(replace(weight_update(version), directory=tmp_path), CLAIM)
    assert sent == [b"changed", b"".join(files.values()), b"changed"]


@pytest.mark.parametrize("said", [b"", b"[]", b"{}", b'{"holds": 1}'])
async def test_an_answer_that_is_none_is_a_failure_of_the_server(update: WeightUpdate, said: bytes) -> None:
    async def peer(head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await body_of(head, reader)
        answer(writer, said)

    async with sender_to(peer) as sender:
        with pytest.raises(ServerFailure, match="did not answer which files of an offer it holds"):
            await sender.send(update, CLAIM)
