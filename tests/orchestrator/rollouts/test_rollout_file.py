"""Rollouts on disk: what is written is read back, and damage is named, never believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.orchestrator.rollouts.rollout_file import (
    RolloutStateError,
    framed,
    frames,
    parse_rollouts,
    read_rollouts,
    rollout_buffers,
    saved_state,
    write_rollouts,
)
from counterpoint.orchestrator.step.records import MOST_READ_STATE, OTHERS, recorded_line
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.files.untrusted import object_in
from counterpoint.transport.records import Alternatives, Rollout, SavedState
from tests.support.rollouts import make_rollout, make_turn


def assert_same(one: Rollout, other: Rollout) -> None:
    assert [len(one.turns), one.state, one.metrics, one.reward, one.error, one.filtered_by, one.advantage] == [
        len(other.turns), other.state, other.metrics, other.reward, other.error, other.filtered_by, other.advantage,
    ]  # fmt: skip
    for a, b in zip(one.turns, other.turns, strict=True):
        assert (a.policy_version, a.finish_reason, a.server, a.routed_experts_start, a.temperature) == (
            b.policy_version, b.finish_reason, b.server, b.routed_experts_start, b.temperature,
        )  # fmt: skip
        np.testing.assert_array_equal(a.prompt_ids, b.prompt_ids)
        np.testing.assert_array_equal(a.completion_ids, b.completion_ids)
        np.testing.assert_array_equal(a.log_probabilities, b.log_probabilities)
        assert (a.routed_experts is None) == (b.routed_experts is None)
        if a.routed_experts is not None and b.routed_experts is not None:
            assert a.routed_experts.dtype == b.routed_experts.dtype
            np.testing.assert_array_equal(a.routed_experts, b.routed_experts)


def test_round_trip(tmp_path: Path) -> None:
    two_turns = [make_turn([1, 2], [3], start=0), make_turn([1, 2, 3, 4], [5, 6], version=1, start=2)]
    rollouts = [
        make_rollout(0, 0, turns=two_turns, state={"text": "ü", "numbers": [1, 2.5, None]}, metrics={"length": 2.0}),
        make_rollout(0, 1, turns=[], reward=None, error="it broke"),
        make_rollout(1, 0, turns=[replace(make_turn([7], [8]), temperature=0.5)], filtered_by="zero_advantage"),
    ]
    path = tmp_path / "rollouts.bin"
    write_rollouts(path, rollouts)
    for written, read in zip(rollouts, read_rollouts(path), strict=True):
        assert_same(written, read)


def test_a_turn_of_an_older_file_has_temperature_1() -> None:
    """Files that were written before the temperature was recorded do not name it."""
    rollout_frame, (turn_header, turn_arrays) = frames(_bytes(rollout_buffers(make_rollout())))
    del turn_header["temperature"]
    (read,) = parse_rollouts(_bytes([*framed(*rollout_frame), *framed(turn_header, turn_arrays)]))
    assert read.turns[0].temperature == 1.0


def _bytes(buffers: Sequence[Buffer]) -> memoryview:
    return memoryview(b"".join(as_bytes_view(buffer) for buffer in buffers))


def test_a_file_has_no_alternatives() -> None:
    turn = make_turn([1, 2], [3, 4])
    found = Alternatives(np.zeros((2, 5), np.int32), np.zeros((2, 5), np.float32))
    plain, asked = (
        [bytes(as_bytes_view(buffer)) for buffer in rollout_buffers(make_rollout(0, 0, turns=[each]))]
        for each in (turn, replace(turn, alternatives=found))
    )
    assert asked == plain
    (read,) = parse_rollouts(memoryview(b"".join(plain)))
    assert read.turns[0].alternatives is None


def test_a_state_larger_than_a_frame_header(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.bin"
    write_rollouts(path, [make_rollout(state={"text": "x" * (3 << 20)})])
    assert len(read_rollouts(path)[0].state["text"]) == 3 << 20


def test_long_integers_of_a_state_are_in_the_file_and_in_the_records(tmp_path: Path) -> None:
    rollout = make_rollout(state={"answer": 2**70 + 1, "text": "a"}, metrics={"digits": 2**70 + 1})
    write_rollouts(tmp_path / "rollouts.bin", [rollout])
    (read,) = read_rollouts(tmp_path / "rollouts.bin")
    assert (read.state, read.metrics) == (rollout.state, rollout.metrics)
    columns = {rollout.environment: ["answer"]}
    assert object_in(recorded_line(read, columns, None))["state"] == {"answer": 2**70 + 1, "text": "a"}  # type: ignore[index]


def test_many_turns(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.bin"
    write_rollouts(path, [make_rollout(turns=[make_turn([1], [2], start=0)] * 3000)])
    assert len(read_rollouts(path)[0].turns) == 3000


def test_a_cut_file_is_refused_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.bin"
    write_rollouts(path, [make_rollout()])
    whole = path.read_bytes()
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"rollouts\.bin"):
            read_rollouts(path)


def test_arrays_are_written_by_reference() -> None:
    turn = make_turn([1, 2, 3], [4], start=0)
    buffers = rollout_buffers(make_rollout(turns=[turn]))
    views = [np.asarray(as_bytes_view(buffer)) for buffer in buffers]
    assert turn.routed_experts is not None
    assert any(np.shares_memory(view, turn.routed_experts) for view in views)


def test_a_state_that_cannot_be_saved_is_named() -> None:
    assert saved_state(make_rollout(state={"fine": {1: "x"}})) == SavedState(b"{}", b'{"fine":{"1":"x"}}')
    assert saved_state(make_rollout(state={"worst": float("nan")})).state == b'{"worst":"NaN"}'
    states: list[Any] = [{"file": object()}, {"size": {2**64}}, {"name": "caf\udce9"}, ["a list"]]
    for state in states:
        with pytest.raises(RolloutStateError, match="the environment left a state"):
            saved_state(make_rollout(state=state))


def test_what_was_finalized_is_written_whatever_became_of_the_state(tmp_path: Path) -> None:
    rollout = make_rollout(state={"answer": "four"}, metrics={"length": 2.0})
    rollout.saved = saved_state(rollout)
    rollout.state["answer"], rollout.metrics["length"] = object(), 3.0
    write_rollouts(tmp_path / "rollouts.bin", [rollout])
    (read,) = read_rollouts(tmp_path / "rollouts.bin")
    assert (read.state, read.metrics) == ({"answer": "four"}, {"length": 2.0})


def test_a_column_that_no_state_has_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    columns = {"misspelt": ["anwser"]}
    for number in range(3):
        rollout = replace(make_rollout(number, number, state={"answer": "yes"}), environment="misspelt")
        assert object_in(recorded_line(rollout, columns, None))["state"] == {"anwser": None, "answer": "yes"}  # type: ignore[index]
    assert caplog.text.count("anwser") == 1
    assert "did you mean 'answer'" in caplog.text


@pytest.mark.parametrize(
    ("state", "columns", "recorded"),
    [
        ({"tries": [1], "deep": {"a": None}}, [], {"tries": [1], "deep": {"a": None}}),
        ({"tries": [1], "other": "x"}, ["other"], {"other": "x", "tries": [1]}),
        ({"page": "x" * 20_000, "n": 1}, [], {"page": "x" * 999 + "…", "n": 1}),
        ({"page": "x" * 20_000, "n": 1}, ["page"], {"page": "x" * 20_000, "n": 1}),
        (
            {f"k{n}": "x" * 900 for n in range(20)},
            [],
            {f"k{n}": "x" * 900 for n in range(18)} | {OTHERS: "18171 bytes"},
        ),
        ({"page": "x" * MOST_READ_STATE}, [], {OTHERS: f"{MOST_READ_STATE + 11} bytes"}),
        ({"page": "x" * MOST_READ_STATE, "n": 1}, ["n"], {"n": 1, "page": "x" * 999 + "…"}),
    ],
)
def test_a_record_has_the_state_within_its_bound(
    state: dict[str, Any], columns: list[str], recorded: dict[str, Any]
) -> None:
    rollout = make_rollout(state=state)
    found = object_in(recorded_line(rollout, {rollout.environment: columns}, None))["state"]  # type: ignore[index]
    assert isinstance(found, dict)
    assert recorded.pop(OTHERS, "") in found.pop(OTHERS, "")
    assert found == recorded


def test_the_right_answer_is_in_the_file_and_in_the_record(tmp_path: Path) -> None:
    rollout = replace(make_rollout(), answer="four")
    write_rollouts(tmp_path / "rollouts.bin", [rollout])
    (read,) = read_rollouts(tmp_path / "rollouts.bin")
    assert object_in(recorded_line(read, {rollout.environment: []}, None))["answer"] == "four"  # type: ignore[index]


def test_a_rollout_that_failed_lacks_no_column(caplog: pytest.LogCaptureFixture) -> None:
    rollout = replace(make_rollout(0, 0, state={}), environment="failing", error="it broke")
    recorded_line(rollout, {"failing": ["answer"]}, None)
    assert not caplog.text
