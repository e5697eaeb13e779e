"""What travels arrives as it was, what cannot travel is named, and nothing that arrives can do harm."""

from __future__ import annotations

import os
import tracemalloc
from collections import OrderedDict
from enum import IntEnum
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from counterpoint.cluster.calls import codec
from counterpoint.cluster.calls.codec import CodecError, decode, encode

DTYPES = st.sampled_from(["bool", "int8", "int64", "uint16", "float16", "float32", "float64", "complex64", ">i4"])

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.binary(min_size=1025, max_size=1030)
    | np_st.arrays(DTYPES, np_st.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    | np_st.from_dtype(np.dtype("float32"), allow_nan=False)
)

KEYS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=8)

VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def assert_same(left: Any, right: Any) -> None:
    """Like `==`, for arrays too, and for the types of everything."""
    assert type(left) is type(right)
    if isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, dict):
        assert [*left] == [*right]
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, np.ndarray):
        assert left.shape == right.shape
        assert left.dtype.newbyteorder("<") == right.dtype
        assert np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
    else:
        assert left == right


@pytest.mark.slow
@given(VALUES)
@settings(max_examples=50)
def test_what_is_sent_arrives(value: object) -> None:
    assert_same(value, decode([bytes(frame) for frame in encode(value, "value")]))


@pytest.mark.slow
@given(VALUES, st.data())
@settings(max_examples=50)
def test_damaged_frames_are_an_error_or_a_value(value: object, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode(value, "value")]
    for _ in range(data.draw(st.integers(1, 3))):
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    change = data.draw(st.sampled_from(["none", "drop", "add", "cut"]))
    if change == "drop":
        frames.pop()
    elif change == "add":
        frames.append(bytearray(8))
    elif change == "cut":
        frames[-1] = frames[-1][:-1]
    try:
        decode(frames)
    except CodecError:
        pass


@given(st.lists(st.binary(max_size=60), max_size=4))
@settings(max_examples=50)
def test_garbage_is_an_error_or_a_value(frames: list[bytes]) -> None:
    try:
        decode(frames)
    except CodecError:
        pass


def test_arrays_travel_and_arrive_without_a_copy() -> None:
    array = np.arange(1000.0)
    frames = encode({"a": [array]}, "value")
    assert len(frames) == 2
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), array)
    assert np.shares_memory(decode(frames)["a"][0], array)


def test_an_array_at_an_odd_address_is_usable() -> None:
    tree, frame = encode(np.arange(4.0), "value")
    shifted = memoryview(b"x" + bytes(frame))[1:]
    assert decode([tree, shifted]).flags.aligned


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([{"config": os}], "args[0]['config']: a module cannot be sent; send numbers, strings, bytes"),
        ([object()], "args[0]: an object cannot be sent"),
        ([np.array(["a"])], "args[0]: an array of dtype '<U1' cannot be sent"),
        ([np.array([object()])], "args[0]: an array of dtype '|O' cannot be sent"),
        ([np.zeros((1,) * 9)], "args[0]: an array of 9 dimensions"),
        ({"a": (1, 2**64)}, "args['a'][1]: 18446744073709551616 cannot be sent"),
        (["\ud800"], "args[0]: '\\ud800' cannot be sent"),
        ([{(1,): 2}], "args[0]: the key (1,) cannot be sent"),
        ({2**70: 1}, "1180591620717411303424 cannot be sent"),
        ([OrderedDict(a=1)], "send dict(...) of it"),
        ([Colour.RED], "send int(...) of it"),
        ([{1, 2}], "args[0]: a set cannot be sent"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # some values have their address in their text
)
def test_what_cannot_travel_is_named(value: object, said: str) -> None:
    with pytest.raises(TypeError) as raised:
        encode(value, "args")
    assert said in str(raised.value)


def test_too_deep_and_too_large_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TypeError, match="32 containers"):
        encode(endless, "args")
    monkeypatch.setattr(codec, "MAX_TREE_BYTES", 1000)
    with pytest.raises(TypeError, match="send arrays"):
        encode("x" * 1001, "args")
    monkeypatch.setattr(codec, "MAX_FRAMES", 2)
    with pytest.raises(TypeError, match="join them"):
        encode([np.zeros(2)] * 3, "args")
    with pytest.raises(CodecError, match="a tree of 1001 bytes"):
        decode([bytes(1001)])


def claim(shape: tuple[int, ...], dtype: int = 4) -> bytes:
    data = bytes([dtype, len(shape)]) + b"".join(size.to_bytes(8, "little") for size in shape)
    return bytes(msgpack.packb(msgpack.ExtType(1, data)))


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xdd\xff\xff\xff\xff"],
        [b"\xdd\x00\xff\xff\xff" * 1000],
        [b"\xdf\x00\xff\xff\xff" * 1000],
        [b"\x91" * 100_000],
        [b"\xc6\xff\xff\xff\xff"],
        [b"\xc9\xff\xff\xff\xff\x01"],
        [claim((2**40,)), bytes(8)],
        [claim((2**63, 2)), bytes(8)],
        [claim((2**62, 0)), b""],
        [claim((2**64 - 1,) * 8), b""],
        [claim((1,), dtype=200), bytes(8)],
        [claim((8,), dtype=0), bytes([2] * 8)],
        [msgpack.packb(msgpack.ExtType(3, b"\x00\x02"))],
        [msgpack.packb(msgpack.ExtType(2, (2**63).to_bytes(8, "little"))), bytes(8)],
        [msgpack.packb([1, msgpack.ExtType(0, b"")])],
        [msgpack.packb({"a": 1}) + b"\x01"],
        [b"\x81\x90\x01"],
        [],
    ],
)
def test_false_claims_cost_no_memory(frames: list[bytes]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            decode(frames)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000
