"""Asks over a UNIX socket: what is answered, what fails and how, hostile bytes, and processes that die or are stopped."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.transport.files.atomic import Buffer
from counterpoint.transport.frames import BadFrame
from counterpoint.transport.rpc.connection import LATE, LOST, Connection, PeerAsk, RpcError, ask_frame
from counterpoint.transport.rpc.stream import StreamReader, UnixListener, ask_once, connect_unix, framed
from tests.support.freezing import freeze

DEADLINE = 60.0


class Answering:
    """Answers by the first frame of what is asked, and notes what becomes of the asks that it keeps."""

    def __init__(self) -> None:
        self.kept: list[PeerAsk] = []
        self.given_up: list[str] = []

    def __call__(self, ask: PeerAsk) -> None:
        match bytes(ask.frames[0]).decode():
            case "fail":
                ask.fail("ValueError", "\ud800 no" + "x" * 5000, "trace")
            case "keep" as word:
                ask.on_cancel = lambda: self.given_up.append(word)
                self.kept.append(ask)
            case _:
                ask.answer(ask.frames)


@pytest.fixture
def answering() -> Answering:
    return Answering()


@pytest_asyncio.fixture
async def listener(tmp_path: Path, answering: Answering) -> AsyncIterator[UnixListener]:
    listener = UnixListener(answering, most_asks=4, most_bytes=2**24, most_clients=3)
    await listener.start(str(tmp_path / "s"))
    yield listener
    listener.close()


@pytest_asyncio.fixture
async def connection(listener: UnixListener, tmp_path: Path) -> Connection:
    return await connect_unix(str(tmp_path / "s"), "the other", DEADLINE)


async def test_frames_come_back_as_they_were(connection: Connection) -> None:
    array = np.arange(1_000_000)
    answer = await connection.ask([b"a", b"", array, b"b" * 70_000, b"c"], DEADLINE)
    assert [bytes(frame) for frame in answer] == [b"a", b"", array.tobytes(), b"b" * 70_000, b"c"]
    assert len(await asyncio.gather(*(connection.ask([b"%d" % number], DEADLINE) for number in range(500)))) == 500


async def test_each_end_that_an_ask_can_have(
    connection: Connection, answering: Answering, listener: UnixListener
) -> None:
    with pytest.raises(RpcError) as failed:
        await connection.ask([b"fail"], DEADLINE)
    assert (failed.value.kind, failed.value.trace, len(str(failed.value))) == ("ValueError", "trace", 2000)
    with pytest.raises(RpcError, match=r"the other did not answer within 0\.01 s") as late:
        await connection.ask([b"keep"], 0.01)
    assert late.value.kind == LATE
    cancelled = connection.ask([b"keep"], DEADLINE)
    await connection.ask([b"so it has arrived"], DEADLINE)
    cancelled.cancel()
    await connection.ask([b"so that has arrived, too"], DEADLINE)
    assert answering.given_up == ["keep"] * 2, "also the late one"
    in_flight = connection.ask([b"keep"], DEADLINE)
    await connection.ask([b"so it has arrived"], DEADLINE)
    listener.close()
    for ask in (in_flight, connection.ask([b"after the end"], DEADLINE)):
        with pytest.raises(RpcError) as lost:
            await ask
        assert lost.value.kind == LOST
    assert answering.given_up == ["keep"] * 3
    for kept in answering.kept:
        kept.answer([b"too late"])  # harms nobody


@pytest.mark.slow
async def test_who_reads_no_answers_is_not_read_either(listener: UnixListener, tmp_path: Path) -> None:
    answer, asks = bytes(2**22), 100
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        client.connect(str(tmp_path / "s"))
        loop, sent = asyncio.get_running_loop(), 0
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                for sent in range(asks):
                    await loop.sock_sendall(client, b"".join(framed([ask_frame(sent, DEADLINE), answer])))
        assert sent < 20, "what its answers take stays bounded"
        reader, answered = StreamReader(), 0
        while answered < sent:
            answered += len(reader.take(await loop.sock_recv_into(client, reader.buffer())))


async def test_one_more_client_than_agreed_takes_the_place_of_one_that_asks_nothing(
    connection: Connection, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    clients = [await connect_unix(path, "the other", DEADLINE) for _ in range(3)]
    async with asyncio.timeout(DEADLINE):
        await connection.ended
    asks = [client.ask([b"keep"], DEADLINE) for client in clients]
    await asyncio.gather(*(client.ask([b"so it has arrived"], DEADLINE) for client in clients))
    async with asyncio.timeout(DEADLINE):
        await (await connect_unix(path, "the other", DEADLINE)).ended
    assert not any(ask.done() for ask in asks)


async def test_code_without_a_loop_asks_once(listener: UnixListener, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    assert [bytes(frame) for frame in await asyncio.to_thread(ask_once, path, [b"a", b"b"], DEADLINE)] == [b"a", b"b"]
    with pytest.raises(RpcError) as failed:
        await asyncio.to_thread(ask_once, path, [b"fail"], DEADLINE)
    assert failed.value.kind == "ValueError"
    for nothing in (TimeoutError, FileNotFoundError):
        with pytest.raises(nothing):
            await asyncio.to_thread(ask_once, path if nothing is TimeoutError else f"{path}-", [b"keep"], 0.05)


GARBAGE = [
    b"\xff\xff\xff\xff",
    struct.pack("<I", 0),
    struct.pack("<IQ", 1, 2**24 + 1),
    struct.pack("<IQ", 1, 2**64 - 1),
    struct.pack("<I9Q", 9, *[2**24] * 9),
    struct.pack("<I", 2**14 + 5),
]
MEANINGLESS: list[list[Buffer]] = [
    [b""],
    [b"\xc1"],
    [b"\x93"],
    [b"\xdd\xff\xff\xff\xff"],
    [b"\x92\x00" + b"\x91" * 100_000],
    [bytes(2**18)],
    [b"\x92\x07\x01"],
    [b"\x92\x00\xff"],
    [b"\x93\x00\x01\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"],
    [b"\x92\x01\x01", b"an answer to nothing"],
    [b"\x92\x03\x09"],
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_what_is_no_message_costs_its_sender_the_connection(
    garbage: bytes, connection: Connection, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
    writer.write(garbage)
    async with asyncio.timeout(DEADLINE):
        assert await reader.read() == b""
    writer.close()
    assert "a caller sent what is no message" in caplog.text
    assert await connection.ask([b"others go on"], DEADLINE)


async def test_a_message_without_a_meaning_is_dropped(tmp_path: Path, connection: Connection) -> None:
    reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
    for message in MEANINGLESS:
        writer.writelines(framed(message))
    writer.writelines(framed([b"\x93\x00\x05\x09", b"sense"]))
    async with asyncio.timeout(DEADLINE):
        assert (await reader.readexactly(4 + 16 + 8)).startswith(b"\x02\0\0\0")
    writer.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.binary(max_size=70), min_size=1, max_size=4), max_size=4), st.data())
def test_messages_are_cut_however_they_arrive(messages: list[list[bytes]], data: st.DataObject) -> None:
    sent = b"".join(b"".join(map(bytes, framed(message))) for message in messages)
    reader = StreamReader()
    found: list[list[Buffer]] = []
    while sent:
        count = data.draw(st.integers(1, len(sent)))
        reader.buffer()[:count] = sent[:count]
        sent, found = sent[count:], found + reader.take(count)
    assert found == messages


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=100))
def test_any_bytes_are_messages_or_refused_and_cost_no_memory(data: bytes) -> None:
    reader = StreamReader(2**20)
    try:
        for index in range(0, len(data), 7):
            part = data[index : index + 7]
            reader.buffer()[: len(part)] = part
            reader.take(len(part))
    except BadFrame:
        return
    assert len(reader.buffer()) <= 2**20


def test_an_announced_frame_takes_memory_only_as_it_comes() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(8):
        feed(StreamReader(), [struct.pack("<IQ", 1, 2**32), bytes(1000)])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # in KiB: 32 GiB were announced


def feed(reader: StreamReader, pieces: Sequence[bytes]) -> None:
    for piece in pieces:
        reader.buffer()[: len(piece)] = piece
        reader.take(len(piece))


PROCESS = """
import asyncio, sys
from counterpoint.transport.rpc.stream import UnixListener
async def main():
    listener = UnixListener(lambda ask: ask.answer(ask.frames) if bytes(ask.frames[0]) == b"x" else None, 4)
    await listener.start(sys.argv[1])
    print("listens", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_dies_or_is_stopped_fails_its_asks(end: signal.Signals, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with subprocess.Popen([sys.executable, "-c", PROCESS, path], stdout=subprocess.PIPE) as process:  # noqa: ASYNC220
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"listens\n"
            connection = await connect_unix(path, "the other", 0.1)
            assert await connection.ask([b"x"], DEADLINE)
            if end == signal.SIGSTOP:
                freeze(process.pid)
            else:
                os.kill(process.pid, end)
            with pytest.raises(RpcError, match=r"stopped|broke") as lost:
                await connection.ask([b"x"], DEADLINE)
            assert lost.value.kind == LOST
        finally:
            process.kill()
