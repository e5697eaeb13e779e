"""Frames are cut apart wherever the stream is, and what is too long, cut off or no message is said before it costs memory."""

from __future__ import annotations

import asyncio
import io
import socket
import struct
from typing import Literal

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.transport.framed_maps import FramedMaps
from counterpoint.transport.frames import BadFrame, Framing

ORDERS: list[Literal["<", ">"]] = ["<", ">"]


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 9)), st.sampled_from(ORDERS))
def test_messages_come_whole_and_in_order_however_they_are_cut(
    messages: list[bytes], parts: list[int], order: Literal["<", ">"]
) -> None:
    framing = Framing(40, order)
    data = b"".join(map(framing.frame, messages))
    assert data == b"".join(struct.pack(f"{order}I", len(message)) + message for message in messages)
    stream = io.BytesIO(data)
    assert list(iter(lambda: framing.read(stream.read), None)) == messages
    received, found, at = bytearray(), [], 0
    for size in [*parts, len(data)]:
        received += data[at : at + size]
        at += size
        found += list(framing.cut(received))
    assert found == messages
    assert not received


async def test_a_stream_and_a_socket_give_the_same() -> None:
    framing, message = Framing(10**6), bytes(range(256)) * 3000
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sending = asyncio.to_thread(ours.sendall, framing.frame(message) + framing.frame(b""))
        received, _ = await asyncio.gather(
            asyncio.to_thread(lambda: [framing.read(theirs.recv), framing.read(theirs.recv)]), sending
        )
    assert received == [message, b""]
    reader = asyncio.StreamReader()
    reader.feed_data(framing.frame(message) + b"\x01\x00")
    reader.feed_eof()
    assert await framing.read_from(reader) == message
    with pytest.raises(EOFError):
        await framing.read_from(reader)


async def test_what_is_too_long_is_refused_before_it_is_read() -> None:
    framing = Framing(10)
    with pytest.raises(BadFrame, match=r"11.*10"):
        framing.frame(bytes(11))
    head = struct.pack("<I", 2**32 - 1)
    asked: list[int] = []

    def receive(count: int) -> bytes:
        asked.append(count)
        return head

    with pytest.raises(BadFrame, match=rf"{2**32 - 1}.*10"):
        framing.read(receive)
    assert asked == [4]
    with pytest.raises(BadFrame):
        list(framing.cut(bytearray(head)))
    reader = asyncio.StreamReader()
    reader.feed_data(head)
    with pytest.raises(BadFrame):
        await framing.read_from(reader)


@pytest.mark.parametrize("data", [b"\x03", b"\x03\x00\x00\x00", b"\x03\x00\x00\x00ab"])
def test_an_end_within_a_message_is_said(data: bytes) -> None:
    with pytest.raises(EOFError, match="within a message"):
        Framing(10).read(io.BytesIO(data).read)


@pytest.mark.parametrize("body", [b"\xc1\xc1\xc1", msgpack.packb(7), msgpack.packb({}), msgpack.packb({"kind": 1})])
def test_what_is_no_map_with_a_kind_is_refused(body: bytes) -> None:
    maps = FramedMaps(Framing(100))
    for read in (
        lambda: maps.unpack(body),
        lambda: maps.read(io.BytesIO(Framing(100).frame(body)).read),
        lambda: list(maps.cut(bytearray(Framing(100).frame(body)))),
    ):
        with pytest.raises(BadFrame):
            read()


def test_messages_before_a_bad_one_are_given() -> None:
    maps, good = FramedMaps(Framing(100)), {"kind": "alive", "status": "é"}
    found = maps.cut(bytearray(maps.frame(good) + Framing(100).frame(b"\xc1")))
    assert next(found) == good
    with pytest.raises(BadFrame):
        next(found)


@pytest.mark.parametrize("value", ["x" * 100, 2**70, object()])
def test_what_cannot_be_sent_is_refused(value: object) -> None:
    with pytest.raises(BadFrame, match="'x'"):
        FramedMaps(Framing(100)).frame({"kind": "x", "value": value})
