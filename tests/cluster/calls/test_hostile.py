"""Peers that send garbage, claim sizes, forge answers, send calls twice, or have no key. See also `tests/transport/rpc`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.cluster.calls.caller import Caller
from counterpoint.cluster.calls.codec import decode, encode_parts
from counterpoint.cluster.calls.group import RoleGroup
from counterpoint.cluster.calls.remote import methods_of, remote
from counterpoint.cluster.calls.server import (
    HELLO,
    CallHeader,
    CallServer,
    call_address,
    read_header,
    read_methods,
)
from counterpoint.cluster.errors import ActorDied, ActorRestarting, CallError, CallTimeout, RemoteError
from counterpoint.cluster.member import Member, Stage
from counterpoint.transport.files.atomic import Buffer
from counterpoint.transport.rpc.connection import Connection, PeerAsk, RpcError
from counterpoint.transport.rpc.loop_thread import LoopThread
from counterpoint.transport.rpc.stream import UnixListener, connect_unix
from counterpoint.transport.wires.endpoint import CurveKeys
from tests.cluster.calls.process import Callee, member, until_no_thread_is_left
from tests.support.polling import wait_until

DEADLINE = 60.0


@pytest.fixture
def callee() -> Callee:
    return Callee()


@pytest.fixture
def address(callee: Callee, tmp_path: Path) -> Iterator[str]:
    with CallServer(callee, "callee-0", 1, call_address(tmp_path, "callee-0"), max_frame_bytes=2**20) as server:
        yield server.address
        callee.open.set()


@pytest_asyncio.fixture
async def raw(address: str) -> AsyncIterator[Connection]:
    """A peer that asks what it likes."""
    connection = await connect_unix(address.removeprefix("ipc://"), "callee-0", DEADLINE)
    yield connection
    connection.close()


def call_frames(number: int, method: str, *args: Any, incarnation: int = 1) -> list[Any]:
    header = CallHeader(b"c" * 16, number, "callee-0", incarnation, method)
    return [msgspec.msgpack.encode(header), *encode_parts({"args": [*args], "kwargs": {}})]


HEADERS = [
    b"",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    bytes(2**18),
    b"\x91" * 1000 + b"\xc0",
    msgspec.msgpack.encode([b"c", 1, "callee-0", 1, "echo"]),
    msgspec.msgpack.encode([b"c" * 16, -1, "callee-0", 1, "echo"]),
    msgspec.msgpack.encode([b"c" * 16, 1, "x" * 1000, 1, "echo"]),
    msgspec.msgpack.encode([b"c" * 16, 1, "callee-0", 1, "echo", 1]),
]


async def test_garbage_is_refused_and_logged(raw: Connection, caplog: pytest.LogCaptureFixture) -> None:
    values = (b"\x01", b"\x92\x90\x90", b"\x92\x90\x81\x01\x02", b"\xc1", b"\xdd\xff\xff\xff\xff")
    bad = [[call_frames(10 + number, "echo")[0], value] for number, value in enumerate(values)]
    for frames in ([], *([header, b"\x90"] for header in HEADERS), *bad):
        with pytest.raises(RpcError) as failed:
            await raw.ask(frames, DEADLINE)
        assert failed.value.kind == "raised CodecError"
    assert "refused a message of a caller" in caplog.text
    assert decode(await raw.ask(call_frames(9, "echo", 1), DEADLINE)) == [1]


@settings(max_examples=100)
@given(st.binary(max_size=80))
def test_a_header_of_anything_is_an_error_or_a_header(data: bytes) -> None:
    for read in (read_header, read_methods):
        try:
            read(data)
        except ValueError:
            pass


def test_a_frame_above_the_limit_costs_its_sender_the_connection(address: str, callee: Callee) -> None:
    with Caller(heartbeat_seconds=30.0) as caller:
        caller.update([member(address)])
        group = RoleGroup("callee", caller)
        assert group.call("echo", 1).result(DEADLINE) == [1]
        with pytest.raises(ActorDied, match="died or is silent"):
            group.call("echo", bytes(2**21)).result(DEADLINE)
        wait_until(lambda: answers_again(group), "another connection")
    assert callee.ran[0] == (1,)


def answers_again(group: Any) -> bool:
    try:
        return bool(group.call("echo", 2).result(DEADLINE) == [2])
    except CallError:
        return False


async def test_a_call_that_is_sent_again_runs_once(raw: Connection, callee: Callee) -> None:
    asks = [raw.ask(call_frames(1, "wait_again"), DEADLINE) for _ in range(3)]
    await raw.ask(call_frames(2, "nap", 0.0), DEADLINE)  # so the others have arrived
    callee.open.set()
    assert decode(await asks[-1]) is True
    for ask in asks[:-1]:  # the answer goes to where its caller now is
        with pytest.raises(RpcError, match="it was sent again"):
            await ask
    assert callee.ran.count("wait_again") == 1
    with pytest.raises(RpcError, match="incarnation 1 of callee-0 answers") as refused:
        await raw.ask(call_frames(3, "echo", incarnation=2), DEADLINE)
    assert refused.value.kind == "refused"


async def test_a_call_whose_deadline_has_passed_is_dropped(raw: Connection, callee: Callee) -> None:
    late = [raw.ask(call_frames(number, method, 60.0), 0.0) for number, method in ((1, "echo"), (2, "nap"))]
    assert decode(await raw.ask(call_frames(3, "echo", "in time"), DEADLINE)) == ["in time"]
    assert (60.0,) not in callee.ran
    for ask in late:
        with pytest.raises(RpcError):
            await ask


class Forging:
    """A server that answers as it likes, by the method's name."""

    answers: dict[str, list[Buffer]] = {"one": [b"\x01"], "two": [b"\xdd\xff\xff\xff\xff"], "three": []}

    def __call__(self, ask: PeerAsk) -> None:
        if ask.frames[0] == HELLO:
            ask.answer([msgspec.msgpack.encode({})])
        else:
            ask.answer(self.answers[read_header(bytes(ask.frames[0])).method])


@contextmanager
def answering(address: str, on_ask: Callable[[PeerAsk], object]) -> Iterator[None]:
    listener, thread = UnixListener(on_ask, 10), LoopThread("calls-forged")
    try:
        thread.run(listener.start(address.removeprefix("ipc://"))).result(DEADLINE)
        yield
        thread.post(listener.close)
    finally:
        thread.close(DEADLINE)


def test_a_server_that_answers_garbage_costs_no_more_than_the_call(tmp_path: Path) -> None:
    address = call_address(tmp_path, "callee-0")
    with answering(address, Forging()), Caller(heartbeat_seconds=30.0) as caller:
        caller.update([member(address)])
        group = RoleGroup("callee", caller)
        kept, bad, forged = group.call("one"), group.call("two"), group.call("three")
        assert kept.result(DEADLINE) == 1
        for call, name in ((bad, "two"), (forged, "three")):
            with pytest.raises(RemoteError, match=rf"callee\.{name}: the result of callee-0 .* cannot be read"):
                call.result(DEADLINE)


@pytest.mark.parametrize("methods", [[], [b"\xc1"], [msgspec.msgpack.encode({1: 2})]], ids=range(3))
def test_a_server_that_does_not_say_its_methods_takes_no_calls(tmp_path: Path, methods: list[Buffer]) -> None:
    address = call_address(tmp_path, "callee-0")
    with answering(address, lambda ask: ask.answer(methods)), Caller(heartbeat_seconds=0.1) as caller:
        caller.update([member(address)])
        with pytest.raises(ActorRestarting, match="does not answer"):
            RoleGroup("callee", caller).call("one").result(DEADLINE)


def keys(server_public: bytes = b"") -> CurveKeys:
    public, secret = zmq.curve_keypair()
    return CurveKeys(server_public, public, secret)


def test_beyond_loopback_only_known_keys_may_call() -> None:
    with pytest.raises(ValueError, match="needs CURVE keys"):
        CallServer(Callee(), "callee-0", 1, "tcp://0.0.0.0:*").start()
    server_keys, known, unknown = keys(), keys(), keys()
    server = CallServer(Callee(), "callee-0", 1, "tcp://127.0.0.1:*", keys=server_keys)
    callee = Member("callee-0", 1, Stage.RUNNING, server.start(), "", server_keys.public.decode())
    try:
        server.authorize([known.public])
        with Caller(keys=known, heartbeat_seconds=30.0) as caller:
            caller.update([callee])
            assert RoleGroup("callee", caller).call("echo", 1).result(DEADLINE) == [1]
        for stranger in (unknown, None):
            with Caller(keys=stranger, heartbeat_seconds=0.1) as caller:
                caller.update([callee])
                with pytest.raises((ActorRestarting, CallTimeout)):
                    RoleGroup("callee", caller).call("echo", 1).result(DEADLINE)
    finally:
        server.close()
    until_no_thread_is_left()


@pytest.mark.parametrize(("address", "key"), [("nonsense", ""), ("tcp://127.0.0.1:9", "too short")])
def test_an_address_that_is_none_costs_no_other_worker(address: str, key: str, tmp_path: Path) -> None:
    good = call_address(tmp_path, "callee-0")
    with CallServer(Callee(), "callee-0", 1, good), Caller(keys=keys(), heartbeat_seconds=30.0) as caller:
        caller.update([member(good), Member("callee-1", 1, Stage.RUNNING, address, "", key)])
        group = RoleGroup("callee", caller)
        with pytest.raises(ActorRestarting, match=r"callee-1.*Invalid argument"):
            group.call("echo", rank=1).result(DEADLINE)
        assert group.call("echo", 1).result(DEADLINE) == [1]


class Parent:
    @remote(idempotent=True)
    def kept(self) -> int:
        return 1

    @remote
    async def later(self) -> int:
        return 2

    def own(self) -> int:
        return 3


class Child(Parent):
    def kept(self) -> int:
        return 4

    async def later(self) -> int:
        return 5


def test_a_method_stays_marked_when_it_is_overridden() -> None:
    assert {name: (method.idempotent, method.is_async) for name, method in methods_of(Child).items()} == {
        "kept": (True, False),
        "later": (False, True),
    }
