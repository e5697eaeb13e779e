"""Items of driven runs and their answers travel whole, and anything else is refused before memory is allocated."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.run.items import AdamW, Given, ItemHeader, Objective, decode_item, encode_item
from counterpoint.transport import codec
from counterpoint.transport.arrays import CodecError
from counterpoint.transport.messages import Answered, Ask
from counterpoint.transport.records import Batch
from tests.support.batches import make_batch

HEADER = ItemHeader(
    objective=Objective(
        {"kind": "sft"}, 1.0, weights=b"\0" * 8, inputs={"a": Given(b"\1" * 8, "int64")}, returns=True, graph=b"{}"
    ),
    updates=True,
    values=AdamW(1e-3, clip=float("inf")),
    publication="one",
    saves="kept",
)


@pytest.mark.parametrize("batch", [None, make_batch()])
def test_an_item_travels(batch: Batch | None) -> None:
    frames = codec.encode_ask(Ask(7, encode_item(HEADER), batch, session=5), "default")
    assert codec.run_of(frames) == "default"
    found = codec.decode_ask(frames, 2**20)
    assert (found.number, found.session) == (7, 5)
    assert decode_item(found.header) == HEADER
    assert (found.batch is None) == (batch is None)
    if batch is not None:
        assert found.batch is not None
        assert codec.digest_of(found.batch) == codec.digest_of(batch)


def test_an_answer_travels() -> None:
    answered = Answered(7, 3, "asker", "no", {"loss": 0.5}, {"log_probabilities": np.array([-1.0, 0.0], np.float32)})
    found = codec.decode_message(codec.encode_message(answered, "default"))
    assert isinstance(found, Answered)
    assert (found.number, found.step, found.fault, found.text, found.metrics) == (7, 3, "asker", "no", {"loss": 0.5})
    assert found.columns["log_probabilities"].tolist() == [-1.0, 0.0]


@given(st.lists(st.binary(max_size=64), max_size=6))
def test_other_frames_are_no_items_or_answers(frames: list[bytes]) -> None:
    for kind in (codec.ITEM, codec.ANSWERED):
        with pytest.raises(CodecError):
            codec.decode_ask([kind, *frames], 2**20)
    with pytest.raises(CodecError):
        codec.decode_answered([codec.ANSWERED, *frames])


def test_an_objective_that_asks_for_what_is_not_known_is_refused() -> None:
    header = msgspec.to_builtins(ItemHeader(objective=Objective()))
    header["objective"]["of_a_later_version"] = True
    with pytest.raises(ValueError, match="of_a_later_version"):
        decode_item(msgspec.msgpack.encode(header))


@given(st.binary(max_size=200))
def test_other_bytes_are_no_header(data: bytes) -> None:
    try:
        decode_item(data)
    except ValueError:
        pass
    with pytest.raises(ValueError, match="item"):
        decode_item(encode_item(HEADER)[:-1])


def test_an_item_whose_batch_is_too_large_is_refused_by_its_own_number() -> None:
    frames = codec.encode_ask(Ask(7, encode_item(HEADER), make_batch(step=3), session=5), "default")
    with pytest.raises(CodecError, match="item 7") as refused:
        codec.decode_ask(frames, 16)
    assert refused.value.step == 7, "its asker knows no step"
