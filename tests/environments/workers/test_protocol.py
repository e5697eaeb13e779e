"""Frames that no worker of ours sends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import msgpack
import numpy as np
import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.workers.protocol import (
    MAX_BATCH,
    TURN,
    Message,
    ProtocolError,
    answer_bytes,
    pack,
    pack_answer,
    set_untrained,
    take_result,
    unpack,
    unpack_answer,
)
from counterpoint.environments.workers.remote_model import RemoteModel
from counterpoint.transport.records import Alternatives
from tests.support.rollouts import make_rollout, make_turn


def test_a_frame_comes_back_as_it_was() -> None:
    messages: list[Any] = [[4, 0.5, {"amount": [2**70, -(2**70)]}], [8, 1, None, [1.0], [[b"{}", b"{}", []]], False]]
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


@pytest.mark.parametrize(
    ("mask", "expected"), [(b"", b"\1\0\0"), (b"\0\0\0", b"\1\0\0"), (b"\0\0\1", b"\1\0\1"), (b"\1\1\1", b"\1\1\1")]
)
def test_a_mask_of_a_worker_leaves_nothing_trained_that_was_not(mask: bytes, expected: bytes) -> None:
    """A call that the worker gave up, and that was answered at that moment, is not known as constrained there."""
    turn = make_turn([1], [2, 3, 4])
    turn.leave_untrained(0, 1)
    set_untrained(turn, mask)
    assert bytes(turn.untrained) == expected


async def test_an_answer_to_a_call_that_was_given_up_is_not_trained() -> None:
    """It arrives while the call is cancelled. The orchestrator has recorded it, and the environment has never seen it."""
    sent: list[Message] = []
    rollout = make_rollout(0, 0, turns=[])
    model = RemoteModel(1, rollout, cast(Chat, None), {}, lambda message, _: sent.append(message))
    call = asyncio.ensure_future(model.generate([1, 2]))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.sleep(0)
    assert call.cancelled()
    number = sent[0][2]
    model.answer([TURN, 1, number, 0, pack_answer(make_turn([1, 2], [3, 4]))])
    (turn,) = rollout.turns
    assert turn.completion_ids.tolist() == [3, 4]
    assert bytes(turn.untrained) == b"\1\1"
    with pytest.raises(ValueError, match="a reward before the first turn"):
        model.reward(1.0)


@pytest.mark.parametrize("rewards", [[[0, float("nan")]], [[0, 1e39]], [[1, 0.5]], [[-1, 0.5]], [[0, 1]], [[0]], 0.5])
def test_rewards_of_turns_that_cannot_be_are_refused(rewards: Any) -> None:
    with pytest.raises(ProtocolError):
        take_result([b"{}", b"{}", [], rewards], [make_turn([1], [2])])


def test_the_most_probable_tokens_reach_a_worker() -> None:
    found = Alternatives(np.asarray([[3, 4], [5, 6]], np.int32), np.asarray([[-1, -np.inf], [0, -2]], np.float32))
    turn = replace(make_turn([1, 2], [3, 4]), alternatives=found)
    (packed,) = unpack(pack([[TURN, 1, 1, 0, pack_answer(turn)]]))
    received = unpack_answer(turn.prompt_ids.tobytes(), packed[4])
    assert received.alternatives is not None
    assert received.alternatives.token_ids_TK.tolist() == found.token_ids_TK.tolist()
    assert received.alternatives.log_probabilities_TK.tolist() == found.log_probabilities_TK.tolist()
    plain = make_turn([1, 2], [3, 4])
    assert unpack_answer(b"", pack_answer(plain)).alternatives is None
    assert (answer_bytes(plain), answer_bytes(turn)) == (2 * (4 + 4), 2 * (4 + 4) + 4 * (4 + 4))
