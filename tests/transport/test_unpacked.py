"""`transport.unpacked`: what is one value arrives as it was, and what is none costs no more memory than its bytes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.cluster.calls import codec as calls
from counterpoint.cluster.channel import messages as channel
from counterpoint.environments.workers import protocol as workers
from counterpoint.inference import wire
from counterpoint.inference.base import GenerateRequest, SamplingParameters
from counterpoint.transport import codec
from counterpoint.transport.arrays import CodecError, unpack_arrays
from counterpoint.transport.framed_maps import FramedMaps
from counterpoint.transport.frames import BadFrame, Framing
from counterpoint.transport.unpacked import long_integer, read_long_integer, shown, unpacked

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.binary(max_size=20) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(value=VALUES, data=st.data())
def test_one_value_arrives_and_nothing_else_does(value: Any, data: st.DataObject) -> None:
    packed = msgpack.packb(value, default=long_integer)
    assert unpacked(packed, "it", CodecError, ext_hook=read_long_integer) == value
    kept = data.draw(st.integers(0, len(packed) - 1))
    for other in (packed[:kept], packed + b"\xc0"):
        with pytest.raises(CodecError, match=r"^it "):
            unpacked(other, "it", CodecError, ext_hook=read_long_integer)


def test_only_integers_are_packed_as_such() -> None:
    with pytest.raises(TypeError, match="object"):
        msgpack.packb(object(), default=long_integer)
    with pytest.raises(CodecError, match="extension 7"):
        unpacked(msgpack.packb(msgpack.ExtType(7, b"")), "it", CodecError, ext_hook=read_long_integer)


def test_limits_hold_and_a_hook_refuses_in_its_own_words() -> None:
    with pytest.raises(CodecError, match=r"^it is not msgpack: .*max_array_len"):
        unpacked(msgpack.packb([1, 2, 3]), "it", CodecError, max_array_len=2)

    def refuse(code: int, data: bytes) -> object:
        raise CodecError(f"{code} is unknown")

    with pytest.raises(CodecError, match=r"^7 is unknown$"):
        unpacked(msgpack.packb(msgpack.ExtType(7, b"")), "it", CodecError, ext_hook=refuse)


SAMPLING = SamplingParameters()
NESTED = b"\xdd" + (2**15).to_bytes(4, "big")
"""A list that claims so many elements, of which the first is to follow."""
CLAIM = 30 * NESTED + b"\xc0" * 2**16
MAP = b"\x81\xa4kind" + CLAIM
MODEL_CALL = wire.encode_request(GenerateRequest("m", np.ones(1, np.int32), SAMPLING)).removesuffix(SAMPLING.packed)
"""One without its sampling parameters, which come last."""


@pytest.mark.parametrize(
    "read",
    [
        lambda: unpack_arrays(b"CPA1" + len(CLAIM).to_bytes(4, "little") + CLAIM),
        lambda: codec.decode_message([b"HELLO", b"\x81\xa1a" + 30 * NESTED]),
        lambda: FramedMaps(Framing(2**20)).unpack(MAP),
        lambda: workers.unpack(CLAIM),
        lambda: wire.decode_request(MODEL_CALL + MAP),
        lambda: calls.decode([CLAIM]),
        lambda: channel.unpack([30 * NESTED], channel.ChannelTurn),
    ],
)
def test_lists_that_claim_what_is_not_there_take_no_memory(read: Any) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((CodecError, BadFrame, workers.ProtocolError)):
            read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(CLAIM)


DEEP = b"\x91" * 1000 + b"\xc0"
"""A list in a list in a list ..., as deep as msgpack reads: `repr` of it fails."""


@pytest.mark.parametrize(
    "read",
    [
        lambda: codec.decode_message([b"HELLO", b"\x82\xa8protocol" + DEEP + b"\xa6run_id" + DEEP]),
        lambda: codec.decode_message([b"READY", b"\x81\xa1a" + DEEP]),
        lambda: codec.decode([codec.BATCH, DEEP, *[b""] * 8], 2**20),
        lambda: unpack_arrays(b"CPA1" + len(DEEP).to_bytes(4, "little") + DEEP),
        lambda: channel.unpack([DEEP], channel.ChannelTurn),
    ],
)
def test_what_is_nested_deep_is_refused_in_words(read: Any) -> None:
    with pytest.raises(CodecError):
        read()


@pytest.mark.parametrize(
    "value",
    [b"x" * 10**7, "x" * 10**7, [10**5000], {"a": [b"x" * 10**7]}, [list(range(10**5))], dict.fromkeys(range(10**5))],
)
def test_a_large_value_is_shown_in_little_memory(value: Any) -> None:
    tracemalloc.start()
    try:
        text = shown(value)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(text) < 100
    assert peak < 10**5
