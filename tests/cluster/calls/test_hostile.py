"""Peers that send garbage, claim sizes, forge answers, send calls twice, or have no key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.cluster.calls import messages
from counterpoint.cluster.calls.caller import Caller
from counterpoint.cluster.calls.codec import CodecError, decode, encode_parts
from counterpoint.cluster.calls.messages import CallHeader
from counterpoint.cluster.calls.remote import methods_of, remote
from counterpoint.cluster.calls.server import KEPT_ANSWERS, KEPT_BYTES, Answers, CallServer
from counterpoint.cluster.calls.server_socket import call_address
from counterpoint.cluster.errors import ActorDied, ActorRestarting, CallError, CallTimeout, RemoteError
from counterpoint.cluster.member import Member, Stage
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
        assert server.address
        yield server.address
        callee.open.set()


@pytest.fixture
def raw(address: str) -> Iterator[zmq.Socket[bytes]]:
    """A peer that sends what it likes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = int(1000 * DEADLINE)
        socket.connect(address)
        yield socket


def call_frames(number: int, method: str, *args: Any, incarnation: int = 1, seconds: float = 60.0) -> list[Any]:
    header = CallHeader(b"c" * 16, number, "callee-0", incarnation, method, seconds)
    return [messages.CALL, header.pack(), *encode_parts({"args": [*args], "kwargs": {}})]


def answered(raw: zmq.Socket[bytes]) -> tuple[bytes, list[Any]]:
    kind, header, *_ = raw.recv_multipart()
    return kind, msgpack.unpackb(header)


GARBAGE: list[list[bytes]] = [
    [b""],
    [b"x" * 1000],
    [b"CALL"],
    [b"CALL", b"", b""],
    [b"CALL", b"\xdd\xff\xff\xff\xff", b"\x90"],
    [b"CALL", b"\xc1", b"\x90"],
    [b"CALL", msgpack.packb([b"c", 1, "callee-0", 1, "echo", 1.0]), b"\x90"],
    [b"CALL", msgpack.packb([b"c" * 16, 1, "callee-0", 1, "echo", float("nan")]), b"\x90"],
    [b"CALL", msgpack.packb([b"c" * 16, 2**63, "x" * 1000, 1, "echo", 1.0]), b"\x90"],
    [b"CALL", bytes(2**18), b"\x90"],
    [b"RESULT", msgpack.packb([1]), b"\x90"],
]


def test_garbage_is_dropped_and_logged(address: str, raw: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture) -> None:
    for frames in GARBAGE:
        raw.send_multipart(frames)
    raw.send_multipart(call_frames(9, "echo", 1))
    assert answered(raw) == (b"RESULT", [9])
    assert "dropped a message of a caller" in caplog.text
    for value in (b"\x01", b"\x92\x90\x90", b"\x92\x90\x81\x01\x02", b"\xc1", b"\xdd\xff\xff\xff\xff"):
        raw.send_multipart([*call_frames(10, "echo")[:2], value])
        kind, header = answered(raw)
        assert (kind, header[1]) == (b"RAISED", "CodecError")


def test_a_frame_above_the_limit_costs_its_sender_the_connection(address: str, callee: Callee) -> None:
    with Caller(heartbeat_seconds=30.0) as caller:
        caller.update([member(address)])
        group = caller.group("callee")
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


def test_a_call_that_is_sent_again_runs_once(raw: zmq.Socket[bytes], callee: Callee) -> None:
    for _ in range(3):
        raw.send_multipart(call_frames(1, "wait_again"))
    raw.send_multipart(call_frames(2, "nap", 0.0))
    assert answered(raw)[1] == [2], "so the others have arrived"
    callee.open.set()
    assert answered(raw) == (b"RESULT", [1])
    raw.send_multipart(call_frames(1, "wait_again"))
    assert answered(raw) == (b"RESULT", [1]), "from what the server kept"
    assert callee.ran.count("wait_again") == 1
    raw.send_multipart(call_frames(3, "echo", incarnation=2))
    assert answered(raw) == (b"REFUSED", [3, "incarnation 1 of callee-0 answers"])


def test_a_call_whose_deadline_has_passed_is_dropped(raw: zmq.Socket[bytes], callee: Callee) -> None:
    for number, method in ((1, "echo"), (2, "nap")):
        raw.send_multipart(call_frames(number, method, 60.0, seconds=-1.0))
    raw.send_multipart(call_frames(3, "echo", "in time"))
    assert answered(raw) == (b"RESULT", [3])
    assert ("in time",) in callee.ran
    assert (60.0,) not in callee.ran


def test_what_is_kept_of_calls_is_bounded() -> None:
    answers = Answers()
    for number in range(2 * KEPT_ANSWERS):
        assert answers.begin((b"c", number), b"peer") is True
        assert answers.begin((b"c", number), b"peer again") is False
        assert answers.end((b"c", number), [b"a"], keep=number % 2 == 0) == b"peer again"
    assert answers.begin((b"c", 0), b"peer") == [b"a"]
    for number in range(1000, 1000 + KEPT_ANSWERS + 1):
        answers.begin((b"c", number), b"peer")
        answers.end((b"c", number), [b"a"], keep=True)
    assert answers.begin((b"c", 0), b"peer") is True, "the oldest has been dropped"
    answers.end((b"c", 0), [bytes(KEPT_BYTES + 1)], keep=True)
    assert answers.begin((b"c", 0), b"peer") is True
    assert len(answers) == 1


@given(st.binary(max_size=80))
@settings(max_examples=100)
def test_a_header_of_anything_is_an_error_or_a_header(data: bytes) -> None:
    for read in (CallHeader.unpack, messages.unpack):
        try:
            read(data)
        except CodecError:
            pass


def test_a_server_that_answers_garbage_costs_no_more_than_the_call(tmp_path: Path) -> None:
    address = call_address(tmp_path, "callee-0")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server, Caller(heartbeat_seconds=30.0) as caller:
        server.linger = 0
        server.rcvtimeo = int(1000 * DEADLINE)
        server.bind(address)
        caller.update([member(address)])
        group = caller.group("callee")
        kept, bad, forged = group.call("one"), group.call("two"), group.call("three")
        peer, hello = server.recv_multipart()
        assert hello == messages.HELLO
        numbers = []
        for _ in range(3):
            _, kind, header, *value = server.recv_multipart()
            assert (kind, decode(value)) == (messages.CALL, [[], {}])
            numbers.append(msgpack.unpackb(header)[1])
        for frames in (*GARBAGE[:-1], [b"METHODS", b"\x80"], [b"METHODS", msgpack.packb(["callee-0", 1, {1: 2}])]):
            server.send_multipart([peer, *frames])
        server.send_multipart([peer, b"RESULT", msgpack.packb([numbers[1]]), b"\xdd\xff\xff\xff\xff"])
        server.send_multipart([peer, b"RAISED", msgpack.packb([numbers[2], 1]), b"\x90"])
        server.send_multipart([peer, b"RESULT", msgpack.packb([numbers[0]]), b"\x01"])
        assert kept.result(DEADLINE) == 1
        with pytest.raises(RemoteError, match=r"callee\.two: the result of callee-0 .* cannot be read"):
            bad.result(DEADLINE)
        with pytest.raises(RemoteError, match=r"callee\.three: the answer of callee-0 .* cannot be read"):
            forged.result(DEADLINE)


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
            assert caller.group("callee").call("echo", 1).result(DEADLINE) == [1]
        for stranger in (unknown, None):
            with Caller(keys=stranger, heartbeat_seconds=0.1) as caller:
                caller.update([callee])
                with pytest.raises((ActorRestarting, CallTimeout)):
                    caller.group("callee").call("echo", 1).result(DEADLINE)
    finally:
        server.close()
    until_no_thread_is_left()


@pytest.mark.parametrize(("address", "key"), [("nonsense", ""), ("tcp://127.0.0.1:9", "too short")])
def test_an_address_that_is_none_costs_no_other_worker(address: str, key: str, tmp_path: Path) -> None:
    good = call_address(tmp_path, "callee-0")
    with CallServer(Callee(), "callee-0", 1, good), Caller(keys=keys(), heartbeat_seconds=30.0) as caller:
        caller.update([member(good), Member("callee-1", 1, Stage.RUNNING, address, "", key)])
        group = caller.group("callee")
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
