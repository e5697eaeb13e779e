"""Finalizing a group: bad data fails its rollout with a reason, the siblings go on, and nothing raises."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from counterpoint.inference.per_tick_limiter import PerTickLimiter
from counterpoint.orchestrator.rollouts.rollout_file import read_rollouts, saved_state, write_rollouts
from counterpoint.orchestrator.scheduling.events import GroupFinalized
from counterpoint.orchestrator.scheduling.giving_up import Lasting
from counterpoint.orchestrator.scheduling.outcomes import DropReason
from counterpoint.orchestrator.step import finalize as finalize_module
from counterpoint.orchestrator.step.advantages import Advantage, AdvantageInputs, AdvantageOutputs, load_advantage
from counterpoint.orchestrator.step.finalize import (
    SMALL_ROLLOUTS,
    SMALL_TEXT,
    SMALL_TOKENS,
    SMALL_TURNS,
    Finalizer,
    finalize,
    finalize_group,
    finalize_in_thread,
)
from counterpoint.orchestrator.step.records import write_records
from counterpoint.run.config import AdvantageConfig, ZeroAdvantageFilter
from counterpoint.run.loop_health.threads import run_cpu_bound
from counterpoint.transport.records import Alternatives, Rollout, SavedState, Turn
from tests.support.rollouts import make_group, make_turn

group_mean = load_advantage(AdvantageConfig())
zero_advantage = ZeroAdvantageFilter()


def test_a_good_group_is_kept_with_its_advantages() -> None:
    group = make_group([1.0, 0.0])
    outcome = finalize_group(group, group_mean, [zero_advantage])
    assert outcome.event == GroupFinalized(5, kept=2, filtered=0, rewards=(1.0, 0.0))
    assert [rollout.advantage for rollout in group] == [0.5, -0.5]


def test_it_rests_beside_a_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    group = make_group([float(index) for index in range(256)])
    with ThreadPoolExecutor(1) as thread:
        finalized = thread.submit(Finalizer(group_mean, []), group, False)
        while not finalized.done():  # as a loop that is always busy
            pass
    assert rests


def test_a_group_that_is_filtered_as_a_whole_says_why() -> None:
    outcome = finalize_group(make_group([0.25, 0.25, 0.25]), group_mean, [zero_advantage])
    assert outcome.event.detail == "3 by zero_advantage (each has the reward 0.25, and a group learns from differences)"
    assert (outcome.event.kept, outcome.event.filtered) == (0, 3)
    rounded = finalize_group(make_group([0.1, 0.1 * 3 / 3]), group_mean, [zero_advantage])
    assert rounded.event.detail.startswith("2 by zero_advantage (each has the reward 0.1,")


def test_filtered_rollouts_are_told_apart_from_kept_ones() -> None:
    group = make_group([1.0, 0.0, 0.5])
    outcome = finalize_group(group, group_mean, [zero_advantage])
    assert outcome.event == GroupFinalized(5, kept=2, filtered=1, rewards=(1.0, 0.0, 0.5))
    assert [rollout.filtered_by for rollout in group] == [None, None, "zero_advantage"]
    assert outcome.caught == {("zero_advantage", "words"): 1}


class Body(bytearray):
    """A server's answer, which a turn's arrays are views of."""


def from_server(rollout: Rollout) -> weakref.ref[Body]:
    """Makes the rollout's one turn as it arrives: log-probabilities and routing in one buffer."""
    (turn,) = rollout.turns
    rows = len(turn.prompt_ids) + len(turn.completion_ids) - 1
    split = turn.log_probabilities.nbytes
    body = Body(turn.log_probabilities.tobytes() + bytes(rows * 2 * 2))
    log_probabilities = np.frombuffer(body, np.float32, len(turn.completion_ids))
    routed_experts = np.frombuffer(body, np.uint8, offset=split).reshape(rows, 2, 2)
    rollout.turns = [replace(turn, log_probabilities=log_probabilities, routed_experts=routed_experts)]
    return weakref.ref(body)


@pytest.mark.parametrize("group_scoring", [False, True])
def test_what_will_not_train_holds_no_answer_of_a_server(group_scoring: bool) -> None:
    """Sixty-four batches of lost rollouts may wait for the next step's records."""
    group = make_group([1.0, 0.0, 0.5])
    group[1].error = "it failed"
    bodies = [from_server(rollout) for rollout in group]
    finalize = Finalizer(group_mean, [ZeroAdvantageFilter(mode="enforce")])
    outcome = finalize(group, group_scoring)
    trains = {rollout.rollout_id for rollout in outcome.rollouts if not group_scoring and rollout.error is None}
    assert len(trains) == outcome.event.kept
    del group
    assert [body() is not None for body in bodies] == [rollout.rollout_id in trains for rollout in outcome.rollouts]
    for rollout in outcome.rollouts:
        assert rollout.turns[0].log_probabilities.tolist() == make_group([0.0])[0].turns[0].log_probabilities.tolist()


def changed(**fields: Any) -> Callable[[Rollout], None]:
    def change(rollout: Rollout) -> None:
        rollout.turns = [replace(rollout.turns[0], **fields)]

    return change


def rewarded(reward: float | None) -> Callable[[Rollout], None]:
    def change(rollout: Rollout) -> None:
        rollout.reward = reward

    return change


def emptied(rollout: Rollout) -> None:
    rollout.turns = []


def half_routed(rollout: Rollout) -> None:
    rollout.turns = [replace(rollout.turns[0], routed_experts=routing(4)), make_turn([1, 2, 0, 1, 2, 9], [4])]


def differently_routed(rollout: Rollout) -> None:
    second = replace(make_turn([1, 2, 0, 1, 2, 9], [4]), routed_experts=routing(6, layers=3))
    rollout.turns = [replace(rollout.turns[0], routed_experts=routing(4)), second]


def routed_with_a_gap(rollout: Rollout) -> None:
    second = replace(make_turn([1, 2, 0, 1, 2, 9], [4]), routed_experts=routing(1), routed_experts_start=5)
    rollout.turns = [replace(rollout.turns[0], routed_experts=routing(4)), second]


def routing(rows: int, layers: int = 2) -> np.ndarray[Any, Any]:
    return np.zeros((rows, layers, 2), dtype=np.uint8)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (rewarded(float("nan")), "the reward is nan; expected a finite number"),
        (rewarded(None), "the reward is None"),
        (rewarded(1e39), "the reward is 1e+39; expected at most 3.4e+38 in size"),
        (emptied, "it ended without any turn"),
        (
            changed(columns={"entropy": [0.1] * 3}),
            "columns holds list as 'entropy'; expected arrays by the names teacher",
        ),
        (
            changed(columns={"entropy": np.zeros(3, np.float32)}),
            "columns holds ndarray as 'entropy'; expected arrays by",
        ),
        (changed(columns={"teacher_log_probabilities": [-0.1]}), "columns holds list as 'teacher_log_probabilities'"),
        (changed(columns=None), "columns is of type NoneType; expected a dict"),
        (changed(columns={3: 4}), "columns holds int as 3"),
        (
            changed(log_probabilities=np.array([-1.0, -1.0], dtype=np.float32)),
            "turn 0: 2 log_probabilities for 3 completion_ids; expected one each",
        ),
        (
            changed(log_probabilities=np.array([-1.0, np.nan, -1.0], dtype=np.float32)),
            "turn 0: log_probabilities[1] is nan; expected a finite number",
        ),
        (
            changed(log_probabilities=np.array([-1.0, 0.5, -1.0], dtype=np.float32)),
            "turn 0: log_probabilities[1] is 0.5; expected 0 or less",
        ),
        (
            changed(log_probabilities=np.array([-1.0, -np.inf, -1.0], dtype=np.float32)),
            "turn 0: log_probabilities[1] is -inf; expected a finite number",
        ),
        (changed(temperature=0.0), "turn 0: temperature is 0.0; expected a positive, finite number"),
        (changed(prompt_ids=np.array([], dtype=np.int32)), "turn 0: prompt_ids is empty"),
        (changed(prompt_ids=np.array([3, -1], dtype=np.int32)), "turn 0: prompt_ids holds the token -1"),
        (changed(completion_ids=np.array([[1, 2, 3]], dtype=np.int32)), "turn 0: completion_ids has shape (1, 3)"),
        (changed(completion_ids=np.array([1, 2, 3], dtype=np.int64)), "dtype int64; expected one dimension of int32"),
        (
            changed(completion_ids=np.array([], dtype=np.int32), log_probabilities=np.array([], dtype=np.float32)),
            "no turn has a completion token",
        ),
        (changed(routed_experts=routing(3)), "routed_experts has 3 rows from position 0 on"),
        (changed(routed_experts=np.zeros((4, 2, 2))), "dtype float64; expected [tokens, layers, top_k]"),
        (half_routed, "turn 1: routed_experts is there in some turns and missing in others"),
        (differently_routed, "turn 1: routed_experts has layers and top_k (3, 2) of uint8; turn 0 has (2, 2)"),
        (routed_with_a_gap, "rows 4 to 4 are missing"),
    ],
)
def test_a_rollout_that_cannot_be_trained_on_fails_and_its_siblings_go_on(
    spoil: Callable[[Rollout], None], reason: str
) -> None:
    group = make_group([1.0, 0.0, 0.25])
    spoil(group[2])
    outcome = finalize_group(group, group_mean, [zero_advantage])
    assert outcome.event == GroupFinalized(5, kept=2, filtered=0, rewards=(1.0, 0.0))
    assert outcome.failed == 1
    assert group[2].error is not None
    assert reason in group[2].error
    assert [rollout.advantage for rollout in group[:2]] == [0.5, -0.5]


def test_a_copy_of_a_turn_has_all_its_fields() -> None:
    (turn,) = make_group([0.0])[0].turns
    columns = {"teacher_log_probabilities": turn.log_probabilities}
    untrained = bytearray(b"\0\1\0")
    turn = Turn(
        turn.prompt_ids, turn.completion_ids, turn.log_probabilities, 3, "length", routing(4), 1, "server", 0.5, 2, "me", "a:1-1",
        17, Alternatives(np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32)), untrained, columns,
    )  # fmt: skip
    assert all(getattr(turn, each.name) is not each.default for each in fields(turn)), (
        "else a lost one would go unnoticed"
    )
    copy, expected = turn.detached(), replace(turn, untrained=bytes(turn.untrained), columns=dict(turn.columns))
    for each in fields(turn):
        np.testing.assert_equal(getattr(copy, each.name), getattr(expected, each.name))
    columns.clear()
    untrained[:] = b"\0\0\0"
    assert copy.columns
    assert copy.untrained == b"\0\1\0"


def test_ids_that_are_stored_elsewhere_keep_their_values_and_leave_copies_alone() -> None:
    (turn,) = make_group([0.0])[0].turns
    before, copy = (turn.prompt_ids, turn.completion_ids), turn.detached()
    memory = np.concatenate([*before, np.array([9], np.int32)])
    turn.store_ids(memory)
    assert (turn.prompt_ids.tolist(), turn.completion_ids.tolist()) == tuple(ids.tolist() for ids in before)
    assert turn.prompt_ids.base is memory
    assert turn.completion_ids.base is memory
    assert (copy.prompt_ids, copy.completion_ids) == before


def test_what_else_might_have_been_sampled_does_not_stay_in_memory() -> None:
    group = make_group([1.0, 0.0])
    found = Alternatives(np.zeros((2, 5), np.int32), np.zeros((2, 5), np.float32))
    answer = np.full(3 + 64, -0.5, np.float32)  # which holds the alternatives, too
    for rollout in group:
        rollout.turns = [
            replace(turn, alternatives=found, log_probabilities=answer[: len(turn.completion_ids)])
            for turn in rollout.turns
        ]
    (kept, filtered) = Finalizer(group_mean, [])(group, group_scoring=False).rollouts
    assert [turn.alternatives for turn in (*kept.turns, *filtered.turns)] == [None] * 2
    assert not any(np.shares_memory(turn.log_probabilities, answer) for turn in (*kept.turns, *filtered.turns))
    assert all(turn.alternatives is found for rollout in group for turn in rollout.turns)


def test_a_rollout_that_failed_before_leaves_and_keeps_its_reason() -> None:
    group = make_group([1.0, 0.0, 9.0])
    group[2].error = "the environment raised KeyError"
    outcome = finalize_group(group, group_mean, [])
    assert outcome.event == GroupFinalized(5, kept=2, filtered=0, rewards=(1.0, 0.0))
    assert outcome.failed == 0
    assert group[2].error == "the environment raised KeyError"


def test_a_group_without_survivors_is_dropped_with_the_first_reason() -> None:
    group = make_group([float("inf"), 1.0])
    group[1].error = "timed out"
    outcome = finalize_group(group, group_mean, [])
    assert outcome.event.kept == 0
    assert outcome.event.dropped is DropReason.FAILED
    assert outcome.event.detail == (
        "no rollout of 2 survived; the first error: the reward is inf; expected a finite number"
    )


def test_a_failure_drops_a_group_that_is_scored_as_one() -> None:
    group = make_group([1.0, 0.0])
    group[0].reward, group[1].error = None, "timed out"  # it was not scored
    outcome = finalize_group(group, group_mean, [], group_scoring=True)
    assert (outcome.event.dropped, outcome.failed) == (DropReason.INCOMPLETE, 0)
    assert group[0].error is None
    assert outcome.event.detail == "scored as a group, and rollout 5-1 failed: timed out"


@pytest.mark.parametrize("group_scoring", [False, True])
def test_a_group_that_inference_failed_is_dropped_for_that(group_scoring: bool) -> None:
    group = make_group([1.0, 1.0])
    for rollout in group:
        rollout.error, rollout.inference_failed = "no answer", True
    outcome = finalize_group(group, group_mean, [], group_scoring=group_scoring)
    assert outcome.event.dropped is DropReason.INFERENCE_FAILED
    group[0].inference_failed = False
    outcome = finalize_group(group, group_mean, [], group_scoring=group_scoring)
    assert outcome.event.dropped is DropReason.FAILED


def test_an_advantage_function_that_fails_drops_the_group_and_says_so() -> None:
    def failing(inputs: AdvantageInputs) -> AdvantageOutputs:
        raise RuntimeError("no")

    outcome = finalize_group(make_group([1.0]), Advantage("mine:function", failing), [])
    assert outcome.event.dropped is DropReason.ADVANTAGE
    assert outcome.event.detail.startswith("advantage function 'mine:function' raised RuntimeError: no (in failing, ")


@pytest.mark.parametrize(
    ("returned", "lasting"),
    [
        (KeyError("score"), Lasting.CODE),
        (AdvantageOutputs([1.0, 2.0]), Lasting.CODE),
        (AdvantageOutputs([float("nan")]), Lasting.CODE),
        (ConnectionError("a model that judges is away"), None),
    ],
    ids=["raises", "wrong_number", "nan", "may_pass"],
)
def test_an_advantage_function_that_cannot_succeed_is_said_to_fail_lastingly(
    returned: AdvantageOutputs | Exception, lasting: Lasting | None
) -> None:
    def failing(inputs: AdvantageInputs) -> AdvantageOutputs:
        if isinstance(returned, Exception):
            raise returned
        return returned

    event = finalize_group(make_group([1.0]), Advantage("mine:function", failing), []).event
    assert event.dropped is DropReason.ADVANTAGE
    assert (event.failure and event.failure.lasting) is lasting
    assert event.failure is None or event.failure.error == event.detail


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()])
async def test_whatever_an_advantage_function_raises_costs_its_group(raised: BaseException) -> None:
    def failing(inputs: AdvantageInputs) -> AdvantageOutputs:
        raise raised

    outcome = await finalize_in_thread(
        Finalizer(Advantage("mine:function", failing), []), make_group([1.0, 0.0]), False
    )
    assert outcome.event.dropped is DropReason.ADVANTAGE
    assert f"'mine:function' raised {type(raised).__name__}" in outcome.event.detail
    assert [rollout.error for rollout in outcome.rollouts] == [outcome.event.detail] * 2


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else "the answer"


def test_a_state_is_recorded_as_it_was_finalized(tmp_path: Path) -> None:
    """However deep it is, and whatever the environment and the advantage function do with it later."""

    def meddling(inputs: AdvantageInputs) -> AdvantageOutputs:
        for rollout in inputs.rollouts:
            rollout.state["answer"], rollout.environment = object(), "nowhere"
            rollout.turns.clear()
        return AdvantageOutputs([1.0] * len(inputs.rollouts))

    group = make_group([1.0, 0.0, 0.5])
    group[0].state["answer"], group[1].state["answer"] = nested(253), "short"
    group[2].state["answer"] = nested(254)
    group[0].metrics["x"] = 1.0
    outcome = Finalizer(Advantage("mine:function", meddling), [])(group, False)
    assert outcome.event == GroupFinalized(5, kept=2, filtered=0, rewards=(1.0, 0.0))
    assert not any(rollout.state or rollout.metrics for rollout in outcome.rollouts), "they are held once, encoded"
    for rollout in group:
        rollout.state["answer"], rollout.metrics["x"], rollout.reward = object(), float("nan"), None
    write_records(tmp_path / "rollouts.jsonl", outcome.rollouts, {"words": ["answer"]})
    write_rollouts(tmp_path / "rollouts.bin", outcome.rollouts)
    records = [orjson.loads(line) for line in (tmp_path / "rollouts.jsonl").read_bytes().splitlines()]
    assert [record["state"]["answer"] for record in records] == [nested(253), "short", None]
    assert "not JSON-serialisable: " in records[2]["error"]
    assert [rollout.state for rollout in read_rollouts(tmp_path / "rollouts.bin")] == [
        {"answer": nested(253)}, {"answer": "short"}, {},
    ]  # fmt: skip
    assert [record["reward"] for record in records] == [1.0, 0.0, 0.5]


async def test_an_operators_function_that_hangs_keeps_nobody_from_computing() -> None:
    called, released = threading.Event(), threading.Event()

    def hangs(inputs: AdvantageInputs) -> AdvantageOutputs:
        called.set()
        released.wait()
        return AdvantageOutputs([0.0] * len(inputs.rollouts))

    finalizing = asyncio.create_task(
        finalize_in_thread(Finalizer(Advantage("tasks:hangs", hangs), []), make_group([1.0, 0.0]), False)
    )
    try:
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(called.wait)
            assert await run_cpu_bound(sum, [1, 2]) == 3
    finally:
        released.set()
    assert (await finalizing).event == GroupFinalized(5, kept=2, filtered=0, rewards=(1.0, 0.0))


def _in_many_turns(group: list[Rollout]) -> None:
    group[0].turns *= SMALL_TURNS + 1


def _long(group: list[Rollout]) -> None:
    group[0].turns[0] = replace(group[0].turns[0], prompt_ids=np.zeros(SMALL_TOKENS, dtype=np.int32))


def _with_routing(group: list[Rollout]) -> None:
    group[0].turns[0] = replace(group[0].turns[0], routed_experts=np.zeros((4, 1, 1), dtype=np.uint8))


@pytest.mark.parametrize(
    ("change", "alone"),
    [
        (lambda group: group[0].state.update(answer="5", right=True, score=0.5, seed=7, none=None), False),
        (_in_many_turns, True),
        (_long, True),
        (_with_routing, True),
        (lambda group: group.extend(replace(group[0], turns=[]) for _ in range(SMALL_ROLLOUTS)), True),
        (lambda group: group[1].state.update(messages=[]), True),
        (lambda group: group[1].state.update(text="x" * SMALL_TEXT), True),
        (lambda group: [each.metrics.update({"x" * (SMALL_TEXT // 2 + 1): 1.0}) for each in group], True),
        (lambda group: group[1].state.update(digits=10**30), True),
        (lambda group: group[1].state.update({1: "a key"}), True),
        (lambda group: group[1].metrics.update({str(number): 1.0 for number in range(33)}), True),
        (lambda group: setattr(group[1], "state", None), True),
    ],
    ids=[
        "small",
        "turns",
        "tokens",
        "routing",
        "rollouts",
        "nested",
        "long text",
        "long texts",
        "long number",
        "no name",
        "many",
        "no dictionary",
    ],
)
async def test_only_a_small_group_is_finalized_on_the_loop(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Rollout]], None], alone: bool
) -> None:
    at: list[int] = []

    def noting(rollout: Rollout) -> SavedState:
        at.append(threading.get_ident())
        return saved_state(rollout)

    monkeypatch.setattr("counterpoint.orchestrator.step.finalize.saved_state", noting)
    group = make_group([1.0, 0.0])
    change(group)
    outcome = await finalize(Finalizer(group_mean, []), group, False, PerTickLimiter(1))
    assert len(outcome.rollouts) == len(group)
    assert (threading.get_ident() not in at) == alone


async def test_a_group_that_is_finalized_on_the_loop_changes_no_more_and_becomes_what_a_thread_makes_of_it(
    tmp_path: Path,
) -> None:
    """Its environment may have left a thread behind, and the loop runs other tasks between the parts."""
    group, same = make_group([1.0, 0.5, 0.0]), make_group([1.0, 0.5, 0.0])
    finalizer = Finalizer(group_mean, [ZeroAdvantageFilter(mode="enforce")])
    finalizing = asyncio.create_task(finalizer.on_loop(group, False))
    for _ in range(2):
        await asyncio.sleep(0)
        for rollout in group:
            rollout.reward, rollout.state, rollout.turns = 7.0, {"changed": 1}, []
    on_loop, in_thread = await finalizing, finalizer(same, False)
    assert on_loop.event == in_thread.event
    for name, outcome in (("loop", on_loop), ("thread", in_thread)):
        write_rollouts(tmp_path / name, outcome.rollouts)
    assert (tmp_path / "loop").read_bytes() == (tmp_path / "thread").read_bytes()
    assert [rollout.turn_hashes for rollout in on_loop.rollouts] == [
        rollout.turn_hashes for rollout in in_thread.rollouts
    ]


async def test_a_state_that_changes_while_it_is_looked_at_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group([1.0, 0.0])
    group[0].state.update(a=1, b=2)
    former = finalize_module._is_plain

    def meddling(value: object) -> bool:
        group[0].state[f"left-behind-{len(group[0].state)}"] = 1  # as a thread of the environment
        return former(value)

    monkeypatch.setattr(finalize_module, "_is_plain", meddling)
    outcome = await finalize(Finalizer(group_mean, []), group, False, PerTickLimiter(1))
    assert outcome.event.kept == 2
