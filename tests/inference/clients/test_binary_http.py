"""The channel against servers that send, byte for byte, what a test says: answers, half answers and nonsense."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from counterpoint.inference.base import InferenceError, RequestRefused, ServerFailure, ServerUnreachable
from counterpoint.inference.clients import binary_http, memory
from counterpoint.inference.clients.binary_http import HEAD_BYTES, BinaryHttpClient
from counterpoint.inference.clients.failures import ERROR_BYTES
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.clients.memory import AHEAD_BYTES, LARGE_BYTES
from counterpoint.inference.config import PoolConfig

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def channel_to(talk: Talk) -> AsyncIterator[BinaryHttpClient]:
    """A channel to a server that does `talk` on every connection."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # The client cut the connection, as it should.
        finally:
            writer.close()

    server = await asyncio.start_server(converse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base"
    async with server, HttpSessions(PoolConfig(urls=[url])) as connections:
        yield connections.binary_client(url)


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    return head, await reader.readexactly(length)


def response(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def answering(*answers: bytes) -> Talk:
    """Answers one request after the other with these bytes, then closes."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await read_request(reader)
            writer.write(answer)
            await writer.drain()

    return talk


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory, "_kept", [])
    yield
    memory._kept.clear()


async def kept_region() -> memory._Region:
    """Waits until neither the thread that mapped the only region nor a step of a task refers to it."""
    async with asyncio.timeout(60):
        while not memory._kept:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    (region,) = memory._kept
    return region


async def post(to: BinaryHttpClient) -> bytes:
    return bytes(await to.post("/path", b"request", "application/msgpack"))


async def test_a_request_says_what_it_must_and_connections_are_used_again() -> None:
    heads: list[bytes] = []
    connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            head, body = await read_request(reader)
            heads.append(head)
            writer.write(response(body * 2))

    async with channel_to(talk) as to:
        assert await post(to) == b"requestrequest"
        assert await post(to) == b"requestrequest"
    assert connections == 1
    assert heads[0].startswith(b"POST /base/path HTTP/1.1\r\nHost: 127.0.0.1:")
    for line in (b"Content-Type: application/msgpack", b"Content-Length: 7", b"Accept-Encoding: identity"):
        assert b"\r\n" + line + b"\r\n" in heads[0]


@pytest.mark.parametrize(
    "length", [0, 1, HEAD_BYTES, LARGE_BYTES - 1, LARGE_BYTES, 3 * LARGE_BYTES + 5, 2 * AHEAD_BYTES + 5]
)
async def test_a_body_is_read_whole(length: int) -> None:
    body = (bytes(range(251)) * (length // 251 + 1))[:length]
    async with channel_to(answering(response(body), response(b"next"))) as to:
        assert await post(to) == body
        assert await post(to) == b"next"


async def test_a_head_may_come_byte_by_byte() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for byte in response(b"body"):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)

    async with channel_to(talk) as to:
        assert await post(to) == b"body"


async def test_many_large_bodies_at_once() -> None:
    body = bytes(5 * LARGE_BYTES // 2)
    async with channel_to(answering(response(body))) as to:
        answers = await asyncio.gather(*(post(to) for _ in range(12)))
    assert all(answer == body for answer in answers)


async def test_memory_that_is_used_again_holds_the_new_answer_alone() -> None:
    async with channel_to(answering(response(b"a" * (LARGE_BYTES + 9)), response(b"b" * (LARGE_BYTES + 5)))) as to:
        assert await post(to) == b"a" * (LARGE_BYTES + 9)
        region = await kept_region()
        assert await post(to) == b"b" * (LARGE_BYTES + 5)
        assert await kept_region() is region


async def test_the_memory_of_an_answer_that_was_cut_is_kept_at_once() -> None:
    """Without a collection of garbage, which comes rarely: an error and its traceback refer to the connection."""
    whole = response(b"a" * 2 * LARGE_BYTES)
    async with channel_to(answering(whole, whole[:-1])) as to:
        await post(to)
        region = await kept_region()
        gc.disable()
        try:
            with pytest.raises(ServerUnreachable):
                await post(to)
            assert memory._kept == [region]
        finally:
            gc.enable()


async def test_memory_is_mapped_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "AHEAD_BYTES", LARGE_BYTES)
    body = bytes(range(256)) * (4 * LARGE_BYTES // 256) + b"and more"
    async with channel_to(answering(response(body), response(b"next"), response(body), b"never")) as to:
        for answer in (body, b"next", body):
            assert await post(to) == answer
        assert len(to.idle) == 1


async def test_a_large_answer_that_does_not_come_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[memory.LargeMemory] = []
    extended = asyncio.Event()

    class Watched(memory.LargeMemory):
        def extend(self) -> None:
            super().extend()
            mapped.append(self)
            loop.call_soon_threadsafe(extended.set)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\nnever more")
        await extended.wait()

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(binary_http, "LargeMemory", Watched)
    async with channel_to(talk) as to:
        with pytest.raises(ServerUnreachable):
            await post(to)
    assert [part.ready for part in mapped] == [AHEAD_BYTES]


async def test_our_own_lack_of_memory_is_no_failure_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary_http, "MAX_RESPONSE_BYTES", 1 << 60)
    async with channel_to(answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 << 60))) as to:
        with pytest.raises(InferenceError, match=rf"/base/path: .* {1 << 60} bytes") as caught:
            await post(to)
        assert not isinstance(caught.value, ServerFailure)
        assert not to.idle


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "does not answer in HTTP/1.1: b'SSH-2.0-OpenSSH_9.6'"),
        (b"HTTP/1.1 OK\r\n\r\n", "does not answer in HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "a header that is none or contradicts another: b'no colon'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "contradicts another"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "announces a length of b'-1' bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9" + b"9" * 30 + b"\r\n\r\n", "announces a length of"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1073741825\r\n\r\n", "announces 1073741825 bytes; at most 1073741824"),
        (b"HTTP/1.1 200 OK\r\n\r\nbody", "answers without a Content-Length"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "answers without a Content-Length, chunked",
        ),
        (response(b"body", "200 OK", "Content-Encoding: gzip"), "chunked or compressed"),
        (response(b"body") + b"more", "sends more than the 4 bytes it announces"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2 * HEAD_BYTES, f"sends a head of more than {HEAD_BYTES} bytes"),
    ],
)
async def test_what_is_no_answer_is_a_failure_that_says_so(answer: bytes, said: str) -> None:
    async with channel_to(answering(answer)) as to:
        with pytest.raises(ServerFailure) as caught:
            await post(to)
    assert said in str(caught.value)
    assert not isinstance(caught.value, ServerUnreachable)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nCont", response(bytes(1000))[:-1], response(bytes(2 * LARGE_BYTES))[:-1]]
)
async def test_a_connection_that_is_cut_is_told_from_an_answer(answer: bytes) -> None:
    async with channel_to(answering(answer)) as to:
        with pytest.raises(ServerUnreachable, match="the server closed the connection"):
            await post(to)


async def test_nothing_listens() -> None:
    async with channel_to(answering()) as to:
        pass
    async with HttpSessions(PoolConfig()) as connections:
        with pytest.raises(ServerUnreachable):
            await post(connections.binary_client(to.url))


@pytest.mark.parametrize(
    ("status", "kind"),
    [("400 Bad", RequestRefused), ("404 Not Found", ServerFailure), ("503", ServerFailure), ("204", ServerFailure)],
)
async def test_an_error_is_told_in_the_servers_words_and_not_all_of_them(status: str, kind: type[Exception]) -> None:
    body = b'{"error": {"message": "' + b"too long " * 100 + b'"}}'
    async with channel_to(answering(response(body, status), response(b"next"))) as to:
        with pytest.raises(kind, match=f"/base/path answered {status[:3]}: too long") as caught:
            await post(to)
        assert len(str(caught.value)) < 1000
        assert await post(to) == b"next"


async def test_an_endless_error_costs_no_more_than_its_beginning() -> None:
    async with channel_to(answering(response(b"x" * 100 * ERROR_BYTES, "500 Oops"))) as to:
        with pytest.raises(ServerFailure, match="answered 500: xxx") as caught:
            await post(to)
        assert len(str(caught.value)) < 1000
        assert not to.idle


@pytest.mark.parametrize(
    "answer", [response(b"body", "200 OK", "Connection: close"), response(b"body").replace(b"HTTP/1.1", b"HTTP/1.0")]
)
async def test_a_server_may_want_no_further_request(answer: bytes) -> None:
    async with channel_to(answering(answer, b"never")) as to:
        assert await post(to) == b"body"
        assert not to.idle
        assert await post(to) == b"body"


async def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    async with channel_to(answering(response(b"body"))) as to:
        for _ in range(3):
            assert await post(to) == b"body"
            async with asyncio.timeout(60):
                while to.idle:  # noqa: ASYNC110 - that the peer has closed is told by the loop alone
                    await asyncio.sleep(0)


async def test_a_connection_that_closes_upon_its_second_request_is_no_failure_of_the_server() -> None:
    requests = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        requests += 1
        await read_request(reader)
        writer.write(response(b"body"))
        await read_request(reader)
        requests += 1

    async with channel_to(talk) as to:
        for _ in range(3):
            assert await post(to) == b"body"
    assert requests == 5, "each but the first was sent twice"


async def test_a_request_is_sent_again_once_and_not_after_the_answer_began() -> None:
    requests = 0
    first = True

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal first, requests
        if first:
            first = False
            return await answering(response(b"body"), response(b"half")[:-1])(reader, writer)
        await read_request(reader)
        requests += 1

    async with channel_to(talk) as to:
        assert await post(to) == b"body"
        with pytest.raises(ServerUnreachable):
            await post(to)
        assert requests == 0
        with pytest.raises(ServerUnreachable):
            await post(to)
        assert requests == 1


async def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await read_request(reader)
            writer.write(response(b"body"))

    async with channel_to(talk) as to:
        await post(to)
        await post(to)
        assert connections == 1
        monkeypatch.setattr(binary_http, "IDLE_SECONDS", -1.0)
        await post(to)
        assert connections == 2


async def test_closing_ends_a_call_by_a_used_connection_too() -> None:
    asked = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answering(response(b"body"))(reader, writer)
        await read_request(reader)
        asked.set()
        await reader.read()

    async with channel_to(talk) as to:
        await post(to)
        call = asyncio.create_task(post(to))
        await asked.wait()
        asked.clear()
        to.close()
        with pytest.raises(ServerUnreachable):
            await call
    assert not asked.is_set()


async def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(response(b"body"))
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(b"and another thing")
        await reader.read()

    async with channel_to(talk) as to:
        assert await post(to) == b"body"
        async with asyncio.timeout(60):
            while to.idle:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)


@pytest.mark.parametrize("sent", [b"", response(bytes(3 * LARGE_BYTES))[:LARGE_BYTES]])
async def test_cancelling_a_call_cuts_its_connection(sent: bytes) -> None:
    arrived, cut = asyncio.Event(), asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(sent)
        await writer.drain()
        arrived.set()
        try:
            assert await reader.read() == b""
        finally:
            cut.set()

    async with channel_to(talk) as to:
        call = asyncio.create_task(post(to))
        await arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(60):
            await cut.wait()
        assert not to.idle


async def test_closing_ends_the_calls_under_way() -> None:
    arrived = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await reader.read()
        await reader.read()

    async with channel_to(talk) as to:
        call = asyncio.create_task(post(to))
        await arrived.wait()
        to.close()
        with pytest.raises(ServerUnreachable):
            await call


async def test_a_connect_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*arguments: object, **keywords: object) -> None:
        await asyncio.Event().wait()

    async with HttpSessions(PoolConfig(connect_timeout_seconds=0.01)) as connections:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
        with pytest.raises(ServerUnreachable, match=r"no connection within 0\.01 s"):
            await post(connections.binary_client("http://127.0.0.1:1"))


@pytest.mark.parametrize("length", [4, 2 * binary_http.FIRST_READ_BYTES], ids=["with their heads", "after them"])
async def test_no_more_answers_are_given_in_one_pass_than_its_share(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binary_http, "ANSWERS_PER_TICK", 2)
    passes = 0
    given: list[int] = []

    def count() -> None:
        nonlocal passes
        passes += 1
        asyncio.get_running_loop().call_soon(count)

    async def call(to: BinaryHttpClient) -> None:
        await post(to)
        given.append(passes)

    async with channel_to(answering(response(bytes(length)))) as to:
        count()
        await asyncio.gather(*(call(to) for _ in range(16)))
    assert max(given.count(moment) for moment in given) <= 2


async def test_no_more_memory_is_asked_for_in_one_pass_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = 0
    begun: list[int] = []
    begin = binary_http._Connection._begin_extension

    def count() -> None:
        nonlocal passes
        passes += 1
        asyncio.get_running_loop().call_soon(count)

    def counted(connection: binary_http._Connection, large: memory.LargeMemory, present: memoryview) -> None:
        begun.append(passes)
        begin(connection, large, present)

    monkeypatch.setattr(binary_http._Connection, "_begin_extension", counted)
    monkeypatch.setattr(memory, "KEPT_BYTES", 0)
    body = bytes(LARGE_BYTES)
    async with channel_to(answering(response(body))) as to:
        count()
        answers = await asyncio.gather(*(post(to) for _ in range(12)))
    assert all(answer == body for answer in answers)
    assert len(begun) == 12
    assert max(begun.count(moment) for moment in begun) == binary_http.EXTENSIONS_PER_TICK


async def test_no_more_of_bodies_is_read_in_one_pass_than_its_share_although_memory_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes, calls = 0, 12
    read: Counter[int] = Counter()
    updated = binary_http._Connection.buffer_updated

    def count() -> None:
        nonlocal passes
        passes += 1
        asyncio.get_running_loop().call_soon(count)

    def counted(connection: binary_http._Connection, nbytes: int) -> None:
        if connection._body is not None:
            read[passes] += 1
        updated(connection, nbytes)

    monkeypatch.setattr(binary_http._Connection, "buffer_updated", counted)
    body = bytes(LARGE_BYTES)
    async with channel_to(answering(response(body), response(body))) as to:
        first = await asyncio.gather(*(post(to) for _ in range(calls)))
        assert all(answer == body for answer in first)
        async with asyncio.timeout(60):
            while len(memory._kept) < calls:  # noqa: ASYNC110 - the threads that mapped them let go of them
                await asyncio.sleep(0.001)
        read.clear()
        count()
        second = await asyncio.gather(*(post(to) for _ in range(calls)))
    assert all(answer == body for answer in second)
    assert sum(read.values()) >= calls
    assert max(read.values()) <= binary_http.READS_PER_TICK


@pytest.mark.parametrize("length", [1000, 5 * binary_http.FIRST_READ_BYTES])
async def test_bytes_that_come_while_a_head_waits_are_those_of_its_answer(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binary_http, "ANSWERS_PER_TICK", 1)
    held: list[int] = []
    updated = binary_http._Connection.buffer_updated

    def noted(connection: binary_http._Connection, nbytes: int) -> None:
        updated(connection, nbytes)
        held.append(len(connection._head))

    monkeypatch.setattr(binary_http._Connection, "buffer_updated", noted)
    body = bytes(index % 251 for index in range(length))

    async def in_pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        answer = response(body)
        for begin in range(0, len(answer), 700):
            writer.write(answer[begin : begin + 700])
            await writer.drain()
            await asyncio.sleep(0)

    async with channel_to(in_pieces) as to:
        answers = await asyncio.gather(*(post(to) for _ in range(24)))
    assert all(answer == body for answer in answers)
    assert max(held) < 2 * binary_http.FIRST_READ_BYTES


async def test_a_connection_that_is_cut_while_its_head_waits_fails_its_call_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(binary_http, "ANSWERS_PER_TICK", 1)
    async with channel_to(answering(response(b"body"))) as to:
        calls = [asyncio.create_task(post(to)) for _ in range(16)]
        await calls[0]
        waiting = [call for call in calls if not call.done()]
        assert waiting
        waiting[-1].cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(answer, asyncio.CancelledError) for answer in answers].count(True) == 1
    assert [answer for answer in answers if not isinstance(answer, BaseException)] == [b"body"] * 15
