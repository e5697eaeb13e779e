from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import msgpack
import pytest

from counterpoint.transport.framed_maps import FramedChannel
from counterpoint.transport.frames import BadFrame
from counterpoint.tune.executors.frames import MAX_BYTES, MESSAGES, receive
from tests.support.polling import until


class Listener:
    """A channel, what it heard, and the other end of its socket."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.heard: list[dict[str, Any]] = []
        self.bad: list[str] = []
        self.channel = FramedChannel(ours, MESSAGES, self.heard.append, self.bad.append)

    def close(self) -> None:
        self.channel.close()
        self.theirs.close()


async def test_messages_arrive_however_they_are_cut() -> None:
    listener = Listener()
    messages = [{"kind": "result", "result": {"x": float("inf"), "text": "é" * size}} for size in (0, 1, 300_000)]
    data = b"".join(map(MESSAGES.frame, messages))
    for start in range(0, len(data), 100_001):
        await asyncio.to_thread(listener.theirs.sendall, data[start : start + 100_001])
        await asyncio.sleep(0)
    await until(lambda: len(listener.heard) == 3, "three messages")
    assert listener.heard == messages
    listener.close()


async def test_a_message_that_does_not_fit_the_socket_is_sent_as_it_is_read() -> None:
    listener = Listener()
    message = {"kind": "setup", "config": "x" * 4_000_000}
    listener.channel.send(message)
    listener.channel.send({"kind": "train"})
    assert await asyncio.to_thread(receive, listener.theirs) == message
    assert await asyncio.to_thread(receive, listener.theirs) == {"kind": "train"}
    listener.close()


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", MAX_BYTES + 1),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 1) + msgpack.packb(7),
        struct.pack("<I", 1) + msgpack.packb({}),
    ],
)
async def test_what_is_no_message_is_refused(data: bytes) -> None:
    listener = Listener()
    listener.theirs.sendall(data)
    await until(lambda: bool(listener.bad), "the refusal")
    assert not listener.heard
    listener.close()
    left, right = socket.socketpair()
    with left, right:
        left.sendall(data)
        with pytest.raises(BadFrame):
            receive(right)


def test_what_cannot_be_sent_is_refused() -> None:
    for value in ("x" * MAX_BYTES, 2**70, object()):
        with pytest.raises(BadFrame):
            MESSAGES.frame({"kind": "x", "value": value})


async def test_the_end_of_the_other_side_is_no_error() -> None:
    listener = Listener()
    listener.theirs.sendall(MESSAGES.frame({"kind": "last"}))
    listener.theirs.close()
    listener.channel.drain()
    assert listener.heard == [{"kind": "last"}]
    listener.channel.send({"kind": "nobody hears this"})
    listener.close()
    left, right = socket.socketpair()
    left.close()
    assert receive(right) is None
    right.close()
