"""Frames round-trip exactly, and whatever was done to them, decoding raises `CodecError` and nothing else."""

from __future__ import annotations

import io
import tracemalloc
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from counterpoint.transport import codec
from counterpoint.transport.arrays import CodecError, pack_arrays, unpack_arrays
from counterpoint.transport.config import TransportConfig, machine_memory
from counterpoint.transport.files.atomic import as_bytes_view
from counterpoint.transport.messages import (
    PROTOCOL_VERSION,
    Acknowledged,
    Bye,
    Commit,
    Evicted,
    Hello,
    Published,
    Ready,
    Rejected,
)
from counterpoint.transport.records import Batch
from counterpoint.transport.validation import validate
from tests.support.batches import assert_equal, batches, make_batch

LIMIT = 2**30

MESSAGES = st.one_of(
    st.builds(Hello, st.text(max_size=20), st.integers(0, 2**40), st.integers(0, 9)),
    st.builds(Ready, st.integers(0, 2**40), st.integers(0, 100), st.integers(0, 2**62)),
    st.builds(Commit, st.integers(0, 2**40), st.integers(0, 2**62)),
    st.builds(Acknowledged, st.integers(0, 2**40), st.integers(0, 2**40)),
    st.builds(Published, st.integers(0, 2**40)),
    st.builds(
        Rejected,
        st.none() | st.integers(0, 2**40),
        st.text(max_size=100),
        st.none() | st.integers(0, 2**62),
    ),
    st.builds(Evicted, st.text(max_size=100)),
    st.builds(Bye, st.text(max_size=100)),
)


def raw(batch: Batch) -> list[bytes]:
    return [bytes(as_bytes_view(frame)) for frame in codec.encode(batch)]


@pytest.mark.slow
@given(batches())
def test_a_batch_survives_the_frames(batch: Batch) -> None:
    assert_equal(codec.decode(raw(batch), LIMIT), batch)


@given(MESSAGES)
def test_a_message_survives_the_frames(message: codec.Message) -> None:
    run_id = "" if isinstance(message, Hello) else "one"
    frames = codec.encode_message(message, run_id)
    assert (codec.decode_message(frames), codec.run_of(frames)) == (message, run_id)


def test_arrays_are_neither_copied_out_nor_in() -> None:
    batch = make_batch(lengths=(9000,), layers=4)
    frames = codec.encode(batch)
    assert np.shares_memory(np.frombuffer(frames[2], np.uint8), batch.token_ids_T)
    decoded = codec.decode(frames, LIMIT)
    assert np.shares_memory(decoded.routed_experts[0][0], batch.routed_experts[0][0])


def test_a_chunk_that_is_not_contiguous_is_copied_once() -> None:
    chunk = np.arange(2 * 4 * 2 * 2, dtype=np.uint8).reshape(8, 2, 2)[::2]
    batch = replace(make_batch(lengths=(5,)), routed_experts=((chunk,),))
    assert_equal(codec.decode(raw(batch), LIMIT), batch)


def test_misaligned_bytes_become_aligned_arrays() -> None:
    frames = [memoryview(b"x" + frame)[1:] for frame in raw(make_batch())]
    decoded = codec.decode(frames, LIMIT)
    assert decoded.sample_offsets.flags.aligned
    assert_equal(decoded, make_batch())


@pytest.mark.slow
@given(batches(), st.data())
def test_a_damaged_batch_raises_the_documented_error_or_is_still_valid(batch: Batch, data: st.DataObject) -> None:
    frames = raw(batch)
    index = data.draw(st.integers(0, len(frames) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "drop", "add", "grow"])):
        case "flip" if frames[index]:
            changed = bytearray(frames[index])
            changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            frames[index] = bytes(changed)
        case "cut" if frames[index]:
            frames[index] = frames[index][: data.draw(st.integers(0, len(frames[index]) - 1))]
        case "drop":
            del frames[index]
        case "add":
            frames.insert(index, data.draw(st.binary(max_size=8)))
        case _:
            frames[index] += data.draw(st.binary(min_size=1, max_size=8))
    try:
        decoded = codec.decode(frames, LIMIT)
    except CodecError:
        return
    validate(decoded)


@given(st.lists(st.binary(max_size=64), max_size=9), st.booleans())
def test_noise_raises_the_documented_error(frames: list[bytes], as_batch: bool) -> None:
    with pytest.raises(CodecError):
        codec.decode([codec.BATCH, *frames] if as_batch else frames, LIMIT)
    with pytest.raises(CodecError):
        codec.decode_message(frames)


@given(MESSAGES, st.data())
def test_a_damaged_message_raises_the_documented_error_or_is_still_one(
    message: codec.Message, data: st.DataObject
) -> None:
    run_id = "" if isinstance(message, Hello) else "one"
    *rest, header = (bytes(as_bytes_view(frame)) for frame in codec.encode_message(message, run_id))
    changed = bytearray(header)
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        codec.decode_message([*rest, bytes(changed[: data.draw(st.integers(0, len(changed)))])])
    except CodecError:
        return


@pytest.mark.parametrize("named", [b"", b"a" * 300, "é".encode(), b"\xff", b"../run", b"run\n"])
def test_what_is_no_id_names_no_run(named: bytes) -> None:
    assert codec.run_of([b"BYE", named, b"\x80"]) == ""


def test_only_what_other_versions_read_names_no_run() -> None:
    """An orchestrator and a trainer of two versions tell each other so by a HELLO and a REJECTED, which stay as they are."""
    assert [len(codec.encode_message(each)) for each in (Hello("one", 0), Rejected(None, "no"))] == [2, 2]
    with pytest.raises(CodecError):
        codec.decode_message(codec.encode_message(Bye()))
    with pytest.raises(CodecError):
        codec.decode_message(codec.encode_message(Hello("one", 0), "one"))


def header_of(*values: object) -> bytes:
    return b"".join(msgpack.packb(value) for value in values)


def test_a_sample_without_a_temperature_is_refused() -> None:
    """As protocol 1 had it, over the wire or in a `batch.bin` that an older program left."""
    frames = raw(make_batch(lengths=(2,), dtype=None))
    specifications = b"".join(map(msgpack.packb, list(msgpack.Unpacker(io.BytesIO(frames[1])))[2:]))
    frames[1] = header_of(["r", 1, 1, 5, False], ["0-0", "toy", 0, 1.0, 0]) + specifications
    with pytest.raises(
        CodecError, match=rf"sample 0 of 1 is .* protocol {PROTOCOL_VERSION} has rollout id, .* temperature"
    ):
        codec.decode(frames, LIMIT)


NESTED = b"\xdd\x00\x0f\xff\xff" * 1000
LIES = {
    "arrays beyond the frames": [codec.BATCH, header_of(["r", 1, 0, 10**9, False])],
    "samples beyond the header": [codec.BATCH, header_of(["r", 1, 10**9, 5, False]), *[b""] * 5],
    "a shape beyond the bytes": [
        codec.BATCH,
        header_of(["r", 1, 0, 5, False], *[["int32", [2**40], 2**42]] * 5),
        *[b"1234"] * 5,
    ],
    "a shape that overflows": [
        codec.BATCH,
        header_of(["r", 1, 0, 5, False], *[["int32", [2**47, 2**47], 0]] * 5),
        *[b""] * 5,
    ],
    "nested lengths": [codec.BATCH, NESTED, *[b""] * 5],
    "a long string": [codec.BATCH, b"\xdb\x7f\xff\xff\xff" + b"x" * 64, *[b""] * 5],
    "an unknown dtype": [codec.BATCH, header_of(["r", 1, 0, 5, False], *[["object", [1], 8]] * 5), *[b"12345678"] * 5],
    "a path for a run": [codec.BATCH, header_of(["../r", 1, 0, 5, False]), *[b""] * 5],
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_costs_no_memory(name: str) -> None:
    frames = LIES[name]
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            codec.decode(frames, LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_nested_lengths_in_packed_arrays_cost_no_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            unpack_arrays(b"CPA1" + len(NESTED).to_bytes(4, "little") + NESTED)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


def test_more_bytes_than_allowed_are_refused_with_their_step() -> None:
    batch = make_batch(step=7)
    with pytest.raises(CodecError, match="max_batch_bytes is 100"):
        codec.decode(raw(batch), 100)
    with pytest.raises(CodecError, match="sidecar 0") as caught:
        codec.decode([*raw(batch)[:2], b"short", *raw(batch)[3:]], LIMIT)
    assert caught.value.step == 7


def test_the_defaults_take_a_step_of_25_gb_where_the_memory_does() -> None:
    config = TransportConfig()
    assert config.max_batch_bytes > 25e9
    assert config.largest_batch == min(config.max_batch_bytes, machine_memory())
    assert TransportConfig(max_batch_bytes=100).largest_batch == 100


@settings(max_examples=30)
@given(batches())
def test_a_batch_survives_a_file(tmp_path_factory: pytest.TempPathFactory, batch: Batch) -> None:
    path = tmp_path_factory.mktemp("batch") / "batch.bin"
    codec.write_file(path, batch)
    assert_equal(codec.read_file(path, LIMIT), batch)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.data())
def test_a_damaged_file_raises_the_documented_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("batch") / "batch.bin"
    codec.write_file(path, make_batch())
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(CodecError, match=r"batch\.bin"):
        codec.read_file(path, LIMIT)
    position = data.draw(st.integers(0, 31))  # the file's own framing and the kind
    changed = bytearray(content)
    changed[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    if position < 29:  # beyond are three bytes of padding
        with pytest.raises(CodecError, match=r"batch\.bin"):
            codec.read_file(path, LIMIT)


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "batch.bin"
    codec.write_file(path, make_batch(step=1))
    with pytest.raises(FileExistsError):
        codec.write_file(path, make_batch(step=2))
    assert codec.read_file(path, LIMIT).step == 1


@pytest.mark.slow
@given(
    st.dictionaries(st.text(max_size=5), st.integers(0, 9) | st.text(max_size=5), max_size=3),
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from(["uint8", "uint16", "float32"])), max_size=4
    ),
    st.binary(max_size=3),
)
def test_packed_arrays_round_trip_aligned(
    header: dict[str, object], shapes: list[tuple[int, int, str]], garbage: bytes
) -> None:
    arrays = {f"a{i}": np.arange(m * n).reshape(m, n).astype(dtype) for i, (m, n, dtype) in enumerate(shapes)}
    frame = b"".join(as_bytes_view(buffer) for buffer in pack_arrays(header, arrays))
    got_header, got = unpack_arrays(frame)
    assert got_header == header
    assert list(got) == list(arrays)
    for name, array in arrays.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array)
    for damaged in (frame[:-1], frame + garbage + b"x", garbage):
        with pytest.raises(CodecError):
            unpack_arrays(damaged)


@given(st.binary(max_size=200))
def test_noise_is_no_packed_arrays(noise: bytes) -> None:
    for data in (noise, b"CPA1" + noise, b"CPA1" + len(noise).to_bytes(4, "little") + noise):
        with pytest.raises(CodecError):
            unpack_arrays(data)


SIZES = st.sampled_from([0, 1, 2, 2**20, 2**47, 2**62, -1, True, None, 1.0])
SPECIFICATIONS = st.one_of(
    st.none(),
    st.lists(SIZES, max_size=4),
    st.tuples(
        st.sampled_from(["uint8", "int32", "float64", b"uint8", 1]), st.lists(SIZES, max_size=5) | SIZES, SIZES
    ).map(list),
)


@given(st.dictionaries(st.sampled_from(["a", "b", b"a", ""]), SPECIFICATIONS, max_size=3), st.integers(0, 16))
@example({"a": ["int32", [0, 2**47, 2**47], 0]}, 0)
@example({b"a": ["uint8", [1], 1]}, 8)
def test_whatever_a_header_says_of_its_arrays(specifications: dict[str | bytes, object], nbytes: int) -> None:
    packed = msgpack.packb([{}, specifications])
    padded = packed + bytes(-(8 + len(packed)) % 8 + nbytes)
    try:
        _, arrays = unpack_arrays(b"CPA1" + len(packed).to_bytes(4, "little") + padded)
    except CodecError:
        return
    assert all(isinstance(name, str) for name in arrays)
    assert sum(array.nbytes for array in arrays.values()) <= nbytes


def test_what_cannot_travel_is_refused_when_packed() -> None:
    with pytest.raises(ValueError, match="<f8"):
        pack_arrays({}, {"a": np.zeros(1)})
    with pytest.raises(ValueError, match="header of"):
        pack_arrays({"a": "x" * 2**20}, {})


@pytest.mark.parametrize("container", [dict.fromkeys(map(str, range(4097))), list(range(4097)), tuple(range(4097))])
def test_a_header_that_could_not_be_read_again_is_not_packed(container: object) -> None:
    with pytest.raises(ValueError, match=r"^players .*\b4097\b.*\b4096\b"):
        pack_arrays({"players": container}, {})
