"""Hashes of turns."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.orchestrator.receipts.receipt import turn_hashes
from counterpoint.orchestrator.rollouts.trajectories import merge_turns
from counterpoint.transport.records import Turn
from tests.support.rollouts import make_rollout, make_turn

IDS = st.lists(st.integers(0, 2), max_size=5)


def plain(ids: list[int]) -> str:
    return hashlib.sha256(np.array(ids, "<i4").tobytes()).hexdigest()[:16]


@given(st.lists(st.tuples(st.booleans(), IDS, IDS, st.sampled_from(["", "one"])), max_size=6))
def test_hashes_are_those_of_all_ids(drawn: list[tuple[bool, list[int], list[int], str]]) -> None:
    """Whatever a turn's prompt has of earlier turns, with and without its branches."""
    turns: list[Turn] = []
    expected, before = [], [0]
    for extends, new, completion, player in drawn:
        prompt = [*(before if extends else []), *new]
        turns.append(make_turn(prompt, completion, player=player))
        expected.append({"prompt_hash": plain(prompt), "completion_hash": plain(completion)})
        before = [*prompt, *completion]
    rollout = make_rollout(turns=turns)
    assert list(turn_hashes(rollout)) == expected
    if turns and all(len(turn.prompt_ids) and len(turn.completion_ids) for turn in turns):
        merge_turns(rollout)
        assert rollout.branches
        assert list(turn_hashes(rollout)) == expected


def test_a_failed_rollout_has_a_record_whatever_its_turns_hold() -> None:
    turn = make_turn([1], [2])
    broken = Turn(np.zeros((2, 2), np.int32), np.zeros(1, np.float32), turn.log_probabilities, 0, "stop")
    nothing = {"prompt_hash": None, "completion_hash": None}
    assert list(turn_hashes(make_rollout(turns=[broken, turn, broken]))) == [
        nothing,
        {"prompt_hash": plain([1]), "completion_hash": plain([2])},
        nothing,
    ]
