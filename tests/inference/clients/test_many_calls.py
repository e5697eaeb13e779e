"""A shared connection of calls against servers that send, byte for byte, what a test says."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from counterpoint.inference.base import ServerFailure, ServerUnreachable
from counterpoint.inference.call_frames import ABORT, ABORTED, CALL, MOST_ANSWER_BYTES, FrameSplitter, taken
from counterpoint.inference.clients import many_calls
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.clients.many_calls import ManyCalls
from counterpoint.inference.config import PoolConfig
from tests.support.polling import until

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

MOST_BYTES = 100
TAKEN = taken(MOST_BYTES)
POSTED = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nposted"


def frame(number: int, status: int, body: bytes = b"") -> bytes:
    return struct.pack("<IHI", number, status, len(body)) + body


@asynccontextmanager
async def calls_to(talk: Talk) -> AsyncIterator[ManyCalls]:
    """Calls of a server that does `talk` on every connection; it answers a POST by itself."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
                await reader.readexactly(int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0]))
                writer.write(POSTED)
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(converse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, HttpSessions(PoolConfig(urls=[url], connect_timeout_seconds=60)) as sessions:
        yield sessions.many_calls(sessions.binary_client(url))


async def ask(calls: ManyCalls, body: bytes = b"call") -> bytes:
    return bytes(await calls.post("/path", body, "application/octet-stream"))


async def frames_of(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, int, bytes]]:
    splitter = FrameSplitter(1 << 20)
    while data := await reader.read(1 << 16):
        for each in splitter.split(data):
            yield each


def sending(*answers: bytes) -> Talk:
    """Takes the connection, sends these bytes once a call has come, and waits for the client's end."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(TAKEN)
        await reader.readexactly(struct.calcsize("<IHI"))
        for answer in answers:
            writer.write(answer)
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()
        await reader.read()

    return talk


async def test_an_answer_may_come_byte_by_byte_and_with_the_head() -> None:
    whole = frame(1, 200, b"answer")
    async with calls_to(sending(*(whole[place : place + 1] for place in range(len(whole))))) as calls:
        assert await ask(calls) == b"answer"

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(TAKEN[:30])
        await asyncio.sleep(0.01)
        writer.write(TAKEN[30:].replace(b"Upgrade: c", b"upgrade:C"))
        await reader.read(1)
        writer.write(whole)
        await reader.read()

    async with calls_to(early) as calls:
        assert await ask(calls) == b"answer"


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (frame(9, 200, b"x"), "answers call 9, which was not made or has its answer"),
        (frame(0, 200, b"x"), "answers call 0, which was not made"),
        (struct.pack("<IHI", 1, 200, MOST_ANSWER_BYTES + 1), "announces 2097153 bytes of call 1; at most 2097152"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "announces"),
    ],
    ids=["not made", "none", "length", "http"],
)
async def test_what_is_no_answer_is_a_failure_that_says_so(sent: bytes, said: str) -> None:
    async with calls_to(sending(sent)) as calls:
        with pytest.raises(ServerFailure, match=said) as failure:
            await asyncio.gather(*(ask(calls) for _ in range(3)))
        assert not isinstance(failure.value, ServerUnreachable)


async def test_a_second_answer_to_a_call_ends_the_connection() -> None:
    async with calls_to(sending(frame(1, 200, b"a") + frame(1, 200, b"b"))) as calls:
        first, second = await asyncio.gather(ask(calls), ask(calls), return_exceptions=True)
        assert first == b"a"
        assert isinstance(second, ServerFailure)


@pytest.mark.parametrize("status", [b"404 Not Found", b"426 Upgrade Required", b"200 OK", b"101 Switching Protocols"])
async def test_any_other_answer_means_posts(status: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.write(b"HTTP/1.1 " + status + b"\r\nUpgrade: another\r\nContent-Length: 0\r\n\r\n")

    async with calls_to(refuse) as calls:
        assert await asyncio.gather(*(ask(calls) for _ in range(5))) == [b"posted"] * 5
        assert await ask(calls) == b"posted"
        assert asked == 1
        monkeypatch.setattr(calls, "_not_before", 0.0)  # as after AGAIN_SECONDS
        assert await ask(calls) == b"posted"
        assert asked == 2


async def test_no_answer_at_all_means_posts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang_up(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        pass

    async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x" * 1000)
            await writer.drain()

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    for talk in (hang_up, endless):
        async with calls_to(talk) as calls:
            assert await ask(calls) == b"posted"
    async with calls_to(silent) as calls:
        monkeypatch.setattr(calls._http, "connect_timeout_seconds", 0.05)
        assert await ask(calls) == b"posted"


async def test_nothing_listens() -> None:
    async with HttpSessions(PoolConfig()) as sessions:
        calls = sessions.many_calls(sessions.binary_client("http://127.0.0.1:1"))
        errors = await asyncio.gather(*(ask(calls) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(each, ServerUnreachable) and "nothing listens" in str(each) for each in errors)


async def test_nothing_listens_at_any_address_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 1)) for address in ("127.0.0.1", "127.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    async with HttpSessions(PoolConfig()) as sessions:
        calls = sessions.many_calls(sessions.binary_client("http://a-host.test:1"))
        with pytest.raises(ServerUnreachable, match="nothing listens"):
            await ask(calls)


async def test_a_call_is_made_again_once_and_by_a_new_connection() -> None:
    connections = 0
    received: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(TAKEN)
        async for number, _, body in frames_of(reader):
            received.append(body)
            if body == b"first" or (body == b"twice" and connections == 2):
                writer.write(frame(number, 200, body))
            else:
                return  # the connection ends

    async with calls_to(talk) as calls:
        with pytest.raises(ServerUnreachable, match=r"/path: .*(closed|reset)"):
            await ask(calls, b"by a new one")
        assert received == [b"by a new one"]
        connections, received[:] = 0, []
        assert await ask(calls, b"first") == b"first"
        assert await ask(calls, b"twice") == b"twice"
        assert received == [b"first", b"twice", b"twice"]
        with pytest.raises(ServerUnreachable):
            await ask(calls, b"never")
        assert received[3:] == [b"never", b"never"]


async def test_a_cancelled_call_is_aborted_and_its_answer_ignored() -> None:
    aborted, answer = asyncio.Event(), asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(TAKEN)
        async for number, kind, body in frames_of(reader):
            if kind == ABORT:
                assert (number, body) == (1, b"")
                aborted.set()
            elif number == 2:
                writer.write(frame(1, ABORTED) + frame(2, 200, b"second"))
            answer.set()

    async with calls_to(talk) as calls:
        first = asyncio.create_task(ask(calls))
        await answer.wait()
        first.cancel()
        await asyncio.wait([first])
        await aborted.wait()
        assert await ask(calls) == b"second"
        assert not first.cancelled() or calls._connection is not None


async def test_closing_ends_the_calls_under_way() -> None:
    async with calls_to(sending()) as calls:
        call = asyncio.create_task(ask(calls))
        await until(lambda: calls._connection is not None, "the connection")
        calls.close()
        calls._http.close()
        with pytest.raises(ServerUnreachable):
            await call


async def test_closing_ends_calls_that_wait_for_the_connection() -> None:
    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with calls_to(silent) as calls:
        waiting = [asyncio.create_task(ask(calls)) for _ in range(3)]
        await until(lambda: calls._opening is not None, "the request for it")
        waiting[0].cancel()
        calls.close()
        calls._http.close()
        first, *others = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(first, asyncio.CancelledError)
        assert all(isinstance(each, ServerUnreachable) for each in others), others


async def test_a_full_connection_leaves_calls_to_posts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_calls, "MOST_CALLS", 2)
    go = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(TAKEN)
        async for number, kind, _ in frames_of(reader):
            assert kind == CALL
            if number == 2:
                await go.wait()
                writer.write(frame(1, 200, b"one") + frame(2, 200, b"two"))

    async with calls_to(talk) as calls:
        one, two = asyncio.create_task(ask(calls)), asyncio.create_task(ask(calls))
        await until(lambda: calls._connection is not None and not calls._connection.takes(b""), "both calls")
        assert await ask(calls) == b"posted"
        go.set()
        assert (await one, await two) == (b"one", b"two")


async def test_a_call_that_is_too_long_for_the_server_is_a_post() -> None:
    async with calls_to(sending(frame(1, 200, b"answer"))) as calls:
        assert await ask(calls, b"x" * MOST_BYTES) == b"answer"
        assert await ask(calls, b"x" * (MOST_BYTES + 1)) == b"posted"


async def test_no_more_answers_are_given_in_one_pass_than_its_share() -> None:
    count = 100
    passes: list[int] = []
    given = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(TAKEN)
        numbers: list[int] = []
        async for number, _, _ in frames_of(reader):
            numbers.append(number)
            if len(numbers) == count:
                writer.write(b"".join(frame(each, 200, b"answer") for each in numbers))

    async def counted(calls: ManyCalls) -> None:
        nonlocal given
        assert await ask(calls) == b"answer"
        given += 1

    async with calls_to(talk) as calls, asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(counted(calls))
        while given < count:
            before = given
            await asyncio.sleep(0)
            passes.append(given - before)
    assert max(passes) <= 4
