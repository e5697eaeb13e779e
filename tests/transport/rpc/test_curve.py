"""Asks over TCP: only peers with known keys, and the end of a peer."""

from __future__ import annotations

import pytest
import zmq

from counterpoint.transport.rpc.connection import LOST, RpcError
from counterpoint.transport.rpc.curve import CurveListener, connect_curve
from counterpoint.transport.wires.endpoint import CurveKeys

DEADLINE = 60.0


def keys() -> CurveKeys:
    public, secret = zmq.curve_keypair()
    return CurveKeys(public, public, secret)


async def test_known_keys_ask_and_others_do_not() -> None:
    own, known, unknown = keys(), keys(), keys()
    listener = CurveListener("tcp://127.0.0.1:*", own, lambda ask: ask.answer(ask.frames), most_asks=4)
    try:
        listener.authorize([known.public])
        connection = connect_curve(listener.address, own.public.decode(), known, "the other", DEADLINE)
        answer = await connection.ask([b"a", b"", b"c" * 2**20], DEADLINE)
        assert [bytes(frame) for frame in answer] == [b"a", b"", b"c" * 2**20]
        stranger = connect_curve(listener.address, own.public.decode(), unknown, "the other", DEADLINE)
        with pytest.raises(RpcError, match="does not know this worker's CURVE key") as refused:
            await stranger.ask([b"a"], DEADLINE)
        assert refused.value.kind == LOST
        mistaken = connect_curve(listener.address, unknown.public.decode(), known, "the other", 0.05)
        with pytest.raises(RpcError):  # the other end is not who it was taken for
            await mistaken.ask([b"a"], 0.5)
        mistaken.close()
    finally:
        listener.close()
    with pytest.raises(RpcError, match="broke") as lost:
        await connection.ask([b"a"], DEADLINE)
    assert lost.value.kind == LOST


@pytest.mark.parametrize(("address", "key"), [("nonsense", ""), ("tcp://127.0.0.1:9", "too short")])
async def test_an_address_or_a_key_that_is_none_is_an_error(address: str, key: str) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        connect_curve(address, key or keys().public.decode(), keys(), "the other", DEADLINE)
