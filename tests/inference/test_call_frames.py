"""Frames of model calls are the same however their bytes come, and take no more memory than they may."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.inference.base import GenerateRequest, SamplingParameters
from counterpoint.inference.call_frames import (
    MOST_ANSWER_BYTES,
    Frame,
    FrameSender,
    FrameSplitter,
    MalformedFrames,
    has_small_answer,
)
from counterpoint.inference.clients.memory import LARGE_BYTES

LONGEST = 40

frames = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1), st.binary(max_size=LONGEST)))


class Written(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closing


async def encoded(sent: list[Frame]) -> list[bytes]:
    transport = Written()
    sender = FrameSender(transport)
    for frame in sent:
        sender.send(*frame)
    await asyncio.sleep(0)
    return transport.writes


@given(frames, st.data())
def test_frames_are_split_wherever_their_bytes_are(sent: list[Frame], data: st.DataObject) -> None:
    whole = b"".join(asyncio.run(encoded(sent)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    splitter, found = FrameSplitter(LONGEST), []
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += splitter.split(whole[begin:end])
        assert splitter.held <= end
    assert found == sent
    assert splitter.held == 0


def test_byte_by_byte() -> None:
    sent = [(1, 200, b"answer"), (2, 0, b""), (3, 503, b"x" * LONGEST)]
    splitter, found = FrameSplitter(LONGEST), []
    for byte in b"".join(asyncio.run(encoded(sent))):
        found += splitter.split(bytes([byte]))
    assert found == sent


def test_what_is_sent_in_one_turn_goes_out_at_once() -> None:
    assert len(asyncio.run(encoded([(number, 0, b"call") for number in range(50)]))) == 1


def test_nothing_is_written_to_a_connection_that_closes() -> None:
    async def sent() -> list[bytes]:
        transport = Written()
        FrameSender(transport).send(1, 0, b"call")
        transport.closing = True
        await asyncio.sleep(0)
        return transport.writes

    assert asyncio.run(sent()) == []


def test_a_frame_that_is_too_long_is_refused_by_its_head() -> None:
    (whole,) = asyncio.run(encoded([(7, 200, b"x" * (LONGEST + 1))]))
    splitter = FrameSplitter(LONGEST)
    with pytest.raises(MalformedFrames, match=r"announces 41 bytes of call 7; at most 40"):
        splitter.split(whole[:10])
    assert splitter.held == 0


@pytest.mark.parametrize(("tokens", "alternatives", "small"), [(6, 0, True), (200_000, 0, True), (2**31 - 1, 0, False),
                                                                (20_000, 8, True), (40_000, 8, False)])  # fmt: skip
def test_answers_that_may_be_large_are_known(tokens: int, alternatives: int, small: bool) -> None:
    assert MOST_ANSWER_BYTES == LARGE_BYTES, "larger ones are read into their final memory, by a POST"
    sampling = SamplingParameters(max_tokens=tokens, alternatives=alternatives)
    assert has_small_answer(GenerateRequest("m", np.ones(1, np.int32), sampling)) == small
