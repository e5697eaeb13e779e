"""Frames that no worker of ours sends."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from environments.workers.protocol import MAX_BATCH, ProtocolError, pack, unpack


def test_a_frame_comes_back_as_it_was() -> None:
    messages: list[Any] = [[4, 0.5], [8, 1, None, [1.0], [[b"{}", b"{}", []]], False]]
    assert unpack(pack(messages)) == messages


@pytest.mark.parametrize(
    "value",
    [
        None,
        4,
        {},
        [4],
        [[]],
        [None],
        [{"4": 0.5}],
        [[None]],
        [["4"]],
        [[4.0]],
        [[True]],
        [[[4]]],
        [[{}]],
        [[4, 0.5], [[8]]],
    ],
)
def test_what_is_no_list_of_messages_is_refused(value: Any) -> None:
    with pytest.raises(ProtocolError, match="is no list of messages"):
        unpack(msgpack.packb(value))


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x91", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, b"\x91\x91\xa1\xff"])
def test_what_is_no_msgpack_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="is not msgpack"):
        unpack(frame)


def test_a_frame_of_more_messages_than_one_may_have_is_refused() -> None:
    message: Any = [4, 0.5]
    assert unpack(pack([message] * MAX_BATCH)) == [message] * MAX_BATCH
    with pytest.raises(ProtocolError, match="a frame of 65 messages; at most 64 come in one"):
        unpack(pack([message] * (MAX_BATCH + 1)))
