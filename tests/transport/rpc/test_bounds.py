"""What waits for its answer is bounded, over a UNIX socket and over TCP alike: who exceeds a bound harms itself alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from counterpoint.transport.rpc.connection import (
    BUSY,
    Connection,
    PeerAsk,
    RpcError,
    _Header,
    _Kind,
    _pack,
    most_together,
)
from counterpoint.transport.rpc.curve import CurveListener, connect_curve
from counterpoint.transport.rpc.stream import UnixListener, connect_unix
from tests.support.polling import until
from tests.transport.rpc.test_curve import keys

DEADLINE = 60.0

FRAME = 2**20
"""The largest frame here; `most_together` of it is 68 MiB."""


class Ends:
    """A listener of four asks a caller, which keeps those with a first frame of one byte, and callers of it."""

    def __init__(self) -> None:
        self.kept: list[PeerAsk] = []
        self.connections: list[Connection] = []
        self.listener: UnixListener | CurveListener
        self.dial: Callable[..., Awaitable[Connection]]

    def take(self, ask: PeerAsk) -> None:
        if len(bytes(ask.frames[0])) == 1:
            self.kept.append(ask)
        else:
            ask.answer(ask.frames[:1])

    async def connect(self, **limits: Any) -> Connection:
        self.connections.append(await self.dial(**limits))
        return self.connections[-1]

    async def until_kept(self, count: int) -> None:
        await until(lambda: len(self.kept) >= count, f"{count} asks")


@pytest_asyncio.fixture(params=["unix", "curve"])
async def ends(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ends]:
    ends, own, known = Ends(), keys(), keys()
    if request.param == "unix":
        path = str(tmp_path / "s")
        ends.listener = UnixListener(ends.take, 4, FRAME)
        await ends.listener.start(path)
        ends.dial = lambda **limits: connect_unix(path, "the other", DEADLINE, FRAME, **limits)
    else:
        ends.listener = CurveListener("tcp://127.0.0.1:*", own, ends.take, 4, FRAME)
        ends.listener.authorize([known.public])
        address, key = ends.listener.address, own.public.decode()

        async def dial(**limits: Any) -> Connection:
            return connect_curve(address, key, known, "the other", DEADLINE, FRAME, **limits)

        ends.dial = dial
    yield ends
    for connection in ends.connections:
        connection.close()
    ends.listener.close()


async def is_refused(ask: asyncio.Future[Any], said: str) -> None:
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(RpcError, match=said) as refused:
            await ask
    assert refused.value.kind == BUSY


async def test_who_asks_too_much_is_refused_and_others_go_on(ends: Ends) -> None:
    greedy, other = await ends.connect(), await ends.connect()
    asks = [greedy.ask([b"k"], DEADLINE) for _ in range(8)]
    await ends.until_kept(4)
    async with asyncio.timeout(DEADLINE):
        assert await other.ask([b"go on"], DEADLINE) == [b"go on"]
    for ask in asks[4:]:
        await is_refused(ask, r"asks 1 bytes more while 4 asks of 4 bytes wait; at most 4 of \d+ bytes may")
    assert len(ends.kept) == 4
    assert not any(ask.done() for ask in asks[:4])
    ends.kept[0].answer([b"done"])
    assert [bytes(frame) for frame in await asks[0]] == [b"done"]
    assert await greedy.ask([b"may again"], DEADLINE) == [b"may again"]


async def test_who_sends_too_many_bytes_is_refused_and_others_go_on(ends: Ends) -> None:
    greedy, other = await ends.connect(), await ends.connect()
    greedy._asking.most_bytes = 2**40
    half = [bytes(FRAME)] * (most_together(FRAME) // FRAME // 2)
    first, second = greedy.ask([b"k", *half], DEADLINE), greedy.ask([b"k", *half], DEADLINE)
    await is_refused(second, r"1 asks of \d+ bytes wait")
    assert await other.ask([b"go on"], DEADLINE) == [b"go on"]
    assert not first.done()


async def test_an_end_that_knows_the_bounds_holds_back_in_order(ends: Ends) -> None:
    connection = await ends.connect(most_asks=4)
    asks = [connection.ask([b"k"], DEADLINE) for _ in range(3)]
    late, cancelled = connection.ask([b"k"], 0.01), connection.ask([b"k"], DEADLINE)
    behind = [connection.ask([b"number %d" % number], DEADLINE) for number in range(9)]
    with pytest.raises(RpcError, match="did not answer within"):
        await late
    cancelled.cancel()
    await ends.until_kept(4)
    assert not any(ask.done() for ask in behind), "what is given up counts until the other end is done with it"
    ends.kept[3].answer([b"of the late one"])
    assert [bytes(*await ask) for ask in behind] == [b"number %d" % number for number in range(9)]
    assert len(ends.kept) == 4, "what was cancelled before there was room is never sent"
    for kept in ends.kept[:3]:
        kept.answer([b"done"])
    assert [bytes(*await ask) for ask in asks] == [b"done"] * 3


async def test_an_ask_that_is_given_up_as_room_comes_is_not_sent(ends: Ends) -> None:
    connection = await ends.connect(most_asks=1)
    first, given_up, behind = (connection.ask([name], DEADLINE) for name in (b"k", b"k", b"behind"))
    await ends.until_kept(1)
    (number,) = connection._asked
    given_up.cancel()
    connection.received([_pack(_Header(_Kind.ANSWER, number)), b"done"])  # before the loop tells that it is given up
    assert [bytes(*await ask) for ask in (first, behind)] == [b"done", b"behind"]
    assert len(ends.kept) == 1


async def test_a_large_ask_that_is_given_up_lets_those_behind_it_go(ends: Ends) -> None:
    connection = await ends.connect(most_asks=4)
    waits = connection.ask([b"k"], DEADLINE)
    large = connection.ask([bytes(FRAME)] * (most_together(FRAME) // FRAME), DEADLINE)
    behind = connection.ask([b"small"], DEADLINE)
    await ends.until_kept(1)
    large.cancel()
    assert bytes(*await behind) == b"small"
    assert not waits.done()


async def test_all_callers_together_are_bounded_also_those_that_have_gone(ends: Ends) -> None:
    ends.listener._load.most_asks = 5
    for count in (2, 4):
        gone = await ends.connect()
        lost = [gone.ask([b"k"], DEADLINE) for _ in range(2)]
        await ends.until_kept(count)
        gone.close()
        assert all(isinstance(ask.exception(), RpcError) for ask in lost)
    connection = await ends.connect()
    kept = connection.ask([b"k"], DEADLINE)
    await ends.until_kept(5)
    await is_refused(connection.ask([b"k"], DEADLINE), r"while 5 asks of 5 bytes wait; at most 5 of")
    for ask in ends.kept[:2]:
        ask.answer([b"to nobody"])
    assert await connection.ask([b"there is room"], DEADLINE) == [b"there is room"]
    assert not kept.done()
