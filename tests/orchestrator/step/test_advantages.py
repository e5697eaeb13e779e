"""Advantages: the built-in functions against their definitions, and a custom function's mistakes refused by its name."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.orchestrator.step.advantages import (
    BUILT_IN,
    Advantage,
    AdvantageError,
    AdvantageInputs,
    AdvantageOutputs,
    load_advantage,
    overlong_penalties,
    try_advantage,
)
from counterpoint.orchestrator.step.players import set_advantages
from counterpoint.run.config import AdvantageConfig, OverlongConfig
from counterpoint.transport.records import Rollout
from tests.support.rollouts import make_group, make_rollout, make_turn

rewards_strategy = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=9)


def compute(
    kind: str, rewards: list[float], lengths: list[int] | None = None, length_penalty: float = 0.0
) -> list[float]:
    advantage = load_advantage(AdvantageConfig(kind=kind, length_penalty=length_penalty))
    return [float(value) for value in advantage.compute(make_group(rewards, lengths))]


@given(rewards_strategy)
def test_group_mean_is_the_reward_above_the_mean(rewards: list[float]) -> None:
    mean = statistics.fmean(rewards)
    assert compute("group_mean", rewards) == pytest.approx([reward - mean for reward in rewards], abs=1e-9)


@given(rewards_strategy)
def test_standardised_divides_by_the_deviation(rewards: list[float]) -> None:
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    expected = [(reward - mean) / deviation if deviation else 0.0 for reward in rewards]
    assert compute("standardised", rewards) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(rewards_strategy)
def test_leave_one_out_compares_with_the_others(rewards: list[float]) -> None:
    expected = [
        reward - statistics.fmean(rewards[:index] + rewards[index + 1 :]) if len(rewards) > 1 else 0.0
        for index, reward in enumerate(rewards)
    ]
    assert compute("leave_one_out", rewards) == pytest.approx(expected, abs=1e-9)


@given(st.sampled_from(["group_mean", "standardised", "leave_one_out"]), st.floats(-1, 1), st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(kind: str, reward: float, count: int) -> None:
    assert compute(kind, [reward] * count) == [0.0] * count


@pytest.mark.parametrize(
    "rewards", [[0.1 + 0.2, 0.3], [float(np.float32(0.1) + np.float32(0.2)), 0.3], [1e9, 1e9 + 1e-6]]
)
@pytest.mark.parametrize("kind", BUILT_IN)
def test_rounding_of_a_reward_is_no_difference(kind: str, rewards: list[float]) -> None:
    """Nor does it become one over a step of such groups."""
    rollouts = step_of(kind, [rewards, rewards])
    load_advantage(AdvantageConfig(kind=kind)).over_step(rollouts)
    assert [rollout.advantage for rollout in rollouts] == [0.0] * 4


def test_small_rewards_differ_as_large_ones_do() -> None:
    assert compute("standardised", [1e-12, 2e-12]) == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize("reward", [0.0, -1.0])
def test_a_group_that_never_succeeded_is_not_told_to_fail_briefly(reward: float) -> None:
    assert compute("group_mean", [reward] * 3, [100, 5, 1], length_penalty=1.0) == [0.0] * 3


def test_the_length_penalty_grows_with_the_share_that_succeeds() -> None:
    spread = {
        successes: np.ptp(compute("group_mean", [1.0] * successes + [0.0] * (4 - successes), [40, 20, 40, 20], 0.4)[:2])
        for successes in (2, 3, 4)
    }
    assert spread == pytest.approx({2: 0.1, 3: 0.15, 4: 0.2})


@given(
    st.lists(
        st.tuples(st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 3.0]), st.integers(1, 1000)), min_size=2, max_size=9
    ),
    st.floats(0, 100),
)
def test_a_longer_rollout_of_a_better_reward_stays_ahead(group: list[tuple[float, int]], penalty: float) -> None:
    rewards, lengths = [reward for reward, _ in group], [length for _, length in group]
    advantages = compute("group_mean", rewards, lengths, length_penalty=penalty)
    for one, advantage in enumerate(advantages):
        for other, other_advantage in enumerate(advantages):
            if rewards[one] > rewards[other]:
                assert advantage > other_advantage
            if rewards[one] == rewards[other] < max(rewards):
                assert advantage == other_advantage
            if rewards[one] == rewards[other] and lengths[one] < lengths[other]:
                assert advantage >= other_advantage


def test_the_length_penalty_is_taken_from_the_reward_that_counts_not_from_the_record() -> None:
    group = make_group([1.0, 1.0], lengths=[4, 2])
    advantage = load_advantage(AdvantageConfig(length_penalty=0.5))
    assert advantage.compute(group) == [-0.125, 0.125]
    assert [rollout.reward for rollout in group] == [1.0, 1.0]


def half(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs(inputs.rewards[: len(inputs.rewards) // 2].tolist())


def of_two(inputs: AdvantageInputs, weight: float) -> AdvantageOutputs:
    return AdvantageOutputs([weight] * len(inputs.rewards))


def by_state(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs([rollout.state["distance"] for rollout in inputs.rollouts])


def test_a_custom_function_is_called_once_before_it_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    kind = f"{__name__}:half"
    with pytest.raises(ValueError, match=rf"'{kind}', .* 4 advantages for 8 rollouts"):
        try_advantage(load_advantage(AdvantageConfig(kind=kind)), 8)
    with pytest.raises(ValueError, match=r"'weight'.*Adv"):
        load_advantage(AdvantageConfig(kind=f"{__name__}:of_two"))
    for kind in ("standardised", f"{__name__}:best_only"):
        try_advantage(load_advantage(AdvantageConfig(kind=kind)), 8)
    assert caplog.text == ""


def test_a_function_that_needs_a_real_state_is_only_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    try_advantage(load_advantage(AdvantageConfig(kind=f"{__name__}:by_state")), 8)
    assert "made-up group, whose rollouts have no state" in caplog.text
    assert "KeyError: 'distance'" in caplog.text


def as_dictionary(inputs: AdvantageInputs) -> AdvantageOutputs:
    rollouts: Any = inputs.rollouts
    return AdvantageOutputs([rollout["reward"] for rollout in rollouts])


def by_another_name(inputs: AdvantageInputs) -> AdvantageOutputs:
    rollouts: Any = inputs.rollouts
    return AdvantageOutputs([float(len(rollout.trajectory)) for rollout in rollouts])


@pytest.mark.parametrize("function", [as_dictionary, by_another_name])
def test_a_function_that_takes_a_rollout_for_something_else_is_refused(function: Any) -> None:
    """It would fail every group of the run."""
    path = f"{__name__}:{function.__name__}"
    with pytest.raises(ValueError, match=rf"advantage.kind = '{path}', .*'Rollout' object .*rollout\.reward"):
        try_advantage(load_advantage(AdvantageConfig(kind=path)), 8)


def best_only(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs([float(reward == inputs.rewards.max()) for reward in inputs.rewards])


def test_a_function_is_loaded_by_import_path() -> None:
    assert compute(f"{__name__}:best_only", [0.0, 2.0, 1.0]) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("group_means", "nearest: group_mean"),
        ("no_such_module:function", "cannot import 'no_such_module'"),
        ("math:no_such_function", "the module 'math' has no such name"),
        ("math:pi", "has a float there, not a function"),
        ("math:", "expected one of group_mean, standardised, leave_one_out"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_explained(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_advantage(AdvantageConfig(kind=kind))
    assert f"advantage.kind = {kind!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("module", "text", "said"),
    [
        ("broken_advantages", "def function(:", "SyntaxError: "),
        ("leaving_advantages", "raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_module_that_breaks_while_it_is_imported_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, text: str, said: str
) -> None:
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"cannot import '{module}' \({said}"):
        load_advantage(AdvantageConfig(kind=f"{module}:function"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (AdvantageOutputs([1.0]), "returned 1 advantages for 2 rollouts"),
        (AdvantageOutputs([1.0, float("nan")]), "returned nan for rollout 5-1; expected a finite number"),
        (AdvantageOutputs([1.0, float("inf")]), "returned inf for rollout 5-1"),
        (AdvantageOutputs([1.0, -1e39]), "returned -1e\\+39 for rollout 5-1; expected .* at most 3.4e\\+38 in size"),
        (AdvantageOutputs([1.0, 10**400]), "returned 1000"),
        (AdvantageOutputs([1.0, None]), "returned None for rollout 5-1"),  # type: ignore[list-item]
        (AdvantageOutputs(3.0), "advantages of type float"),  # type: ignore[arg-type]
        ([1.0, 2.0], "returned list; expected AdvantageOutputs"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused_by_name(answer: Any, message: str) -> None:
    advantage = Advantage("mine:function", lambda inputs: answer)
    with pytest.raises(AdvantageError, match=message) as caught:
        advantage.compute(make_group([0.0, 1.0]))
    assert "'mine:function'" in str(caught.value)


def test_what_a_function_raises_is_passed_on_with_its_name() -> None:
    def failing(inputs: AdvantageInputs) -> AdvantageOutputs:
        raise KeyError("score")

    with pytest.raises(AdvantageError, match="'mine:function' raised KeyError: 'score'"):
        Advantage("mine:function", failing).compute(make_group([0.0]))


def test_a_function_cannot_change_the_turns_that_are_trained() -> None:
    def change(inputs: AdvantageInputs) -> AdvantageOutputs:
        inputs.rollouts[0].turns[0].columns["mine"] = np.zeros(1, np.float32)
        return AdvantageOutputs([0.0, 1.0])

    group = make_group([0.0, 1.0])
    Advantage("mine:function", change).compute(group)
    assert [turn.columns for rollout in group for turn in rollout.turns] == [
        {} for rollout in group for _ in rollout.turns
    ]


def test_numpy_numbers_are_numbers() -> None:
    answer = AdvantageOutputs(list(np.array([0.5, -0.5], dtype=np.float32)))
    assert Advantage("mine:function", lambda inputs: answer).compute(make_group([0.0, 1.0])) == [0.5, -0.5]


def step_of(kind: str, groups: list[list[float]]) -> list[Rollout]:
    """Rollouts of a step: groups with these rewards, their advantages those of the groups."""
    advantage = load_advantage(AdvantageConfig(kind=kind))
    rollouts = []
    for number, rewards in enumerate(groups):
        group = [replace(rollout, group_id=number) for rollout in make_group(rewards)]
        set_advantages(advantage, group)
        rollouts += group
    return rollouts


@pytest.mark.parametrize("kind", ["batch_standardised", "group_mean_batch_scaled"])
def test_advantages_relative_to_the_step(kind: str) -> None:
    groups = [[1.0, 0.0, 0.0], [0.5, 0.5], [3.0, 1.0, 1.0, 0.0]]
    rollouts = step_of(kind, groups)
    rollouts[1].filtered_by = "gibberish"  # neither counts nor changes
    former = rollouts[1].advantage
    load_advantage(AdvantageConfig(kind=kind)).over_step(rollouts)
    means = [0.0, 0.0, 0.0] if kind == "batch_standardised" else [statistics.fmean(rewards) for rewards in groups]
    differences = [reward - mean for rewards, mean in zip(groups, means, strict=True) for reward in rewards]
    del differences[1]
    mean = statistics.fmean(differences) if kind == "batch_standardised" else 0.0
    expected = [(value - mean) / statistics.pstdev(differences) for value in differences]
    assert [rollout.advantage for rollout in rollouts[:1] + rollouts[2:]] == pytest.approx(expected)
    assert rollouts[1].advantage == former


def test_a_step_of_equal_rewards_has_no_advantage() -> None:
    for kind in ("batch_standardised", "group_mean_batch_scaled"):
        rollouts = step_of(kind, [[0.1, 0.1, 0.1], [0.1]])
        load_advantage(AdvantageConfig(kind=kind)).over_step(rollouts)
        assert [rollout.advantage for rollout in rollouts] == [0.0] * 4
        load_advantage(AdvantageConfig(kind=kind)).over_step([])


@pytest.mark.parametrize("left", [[0.75], [0.75, 0.75], [2 / 3, 1 - 1 / 3], [0.1] * 3])
@pytest.mark.parametrize("kind", ["batch_standardised", "group_mean_batch_scaled"])
def test_what_filters_leave_of_a_step_may_all_be_equal(kind: str, left: list[float]) -> None:
    """Then it has no deviation, or one of rounding, to divide by."""
    rollouts = make_group([0.0] * len(left))
    players = make_group([0.0])
    for rollout, value in zip(rollouts, left, strict=True):
        rollout.advantage = value
    players[0].player_advantages = {"a": 0.5, "b": -0.5}
    load_advantage(AdvantageConfig(kind=kind)).over_step(rollouts + players)
    assert [rollout.advantage for rollout in rollouts] == [0.0] * len(left)
    assert players[0].player_advantages == {"a": 0.0, "b": 0.0}


@pytest.mark.parametrize(
    ("former", "latter"), [("batch_standardised", "group_mean"), ("group_mean", "batch_standardised")]
)
def test_after_a_change_of_the_kind_rollouts_keep_the_one_that_they_were_finalized_with(
    former: str, latter: str
) -> None:
    values = {}
    step = []
    for kind, rewards in ((former, [5.0, 7.0]), (latter, [3.0, 3.0, 6.0])):
        group = make_group(rewards)
        set_advantages(load_advantage(AdvantageConfig(kind=kind)), group)
        values[kind] = statistics.fmean(rewards), statistics.pstdev(rewards), group
        step += group
    load_advantage(AdvantageConfig(kind=latter)).over_step(step)
    for kind, (mean, deviation, group) in values.items():
        scale = deviation if kind == "batch_standardised" else 1.0
        expected = [((each.reward or 0.0) - mean) / scale for each in group]
        assert [each.advantage for each in group] == pytest.approx(expected)


def test_players_are_relative_to_themselves_over_a_step() -> None:
    rollouts = make_group([0.0] * 3)
    for rollout, (white, black) in zip(rollouts, [(1.0, 20.0), (0.0, 30.0), (0.5, 10.0)], strict=True):
        rollout.player_advantages = {"white": white, "black": black}
    rollouts[0].player_advantages.pop("white")
    load_advantage(AdvantageConfig(kind="batch_standardised")).over_step(rollouts)
    assert [rollout.player_advantages.get("white") for rollout in rollouts] == [None, -1.0, 1.0]
    deviation = statistics.pstdev([10.0, 20.0, 30.0])
    assert [rollout.player_advantages["black"] for rollout in rollouts] == pytest.approx(
        [0.0, 10 / deviation, -10 / deviation]
    )
    # The one that says most of the rollout, for what reads one number of it.
    assert [rollout.advantage for rollout in rollouts] == pytest.approx([0.0, 10 / deviation, -10 / deviation])


def test_overlong_completions_are_penalised_before_advantages() -> None:
    overlong = OverlongConfig(longest=20, buffer=5, penalty=2.0)
    lengths = [1, 15, 16, 18, 20, 21]
    assert overlong_penalties(overlong, np.array(lengths)).tolist() == pytest.approx([0, 0, 0.4, 1.2, 2.0, 2.0])
    advantage = load_advantage(AdvantageConfig(kind="group_mean", overlong=overlong))
    group = make_group([1.0] * 6, lengths)
    assert advantage.compute(group) == pytest.approx([5.6 / 6 - cost for cost in (0, 0, 0.4, 1.2, 2.0, 2.0)])
    assert [rollout.reward for rollout in group] == [1.0] * 6


def test_a_conversation_is_overlong_by_its_longest_completion() -> None:
    """Not by all of its turns: each of them has the limit for itself."""
    overlong = OverlongConfig(longest=20, buffer=5, penalty=2.0)
    advantage = load_advantage(AdvantageConfig(kind="group_mean", overlong=overlong))
    turns = [[15, 15, 15], [1, 18, 16], [20, 1], [], [4, 18]]
    group = [
        make_rollout(5, index, turns=[make_turn([1], range(length)) for length in lengths], reward=1.0)
        for index, lengths in enumerate(turns)
    ]
    costs = [0.0, 1.2, 2.0, 0.0, 1.2]
    assert advantage.compute(group) == pytest.approx([sum(costs) / 5 - cost for cost in costs])


def test_a_length_penalty_is_of_all_turns() -> None:
    group = [
        make_rollout(5, index, turns=[make_turn([1], range(length)) for length in lengths], reward=1.0)
        for index, lengths in enumerate([[10, 10], [12]])
    ]
    advantage = load_advantage(AdvantageConfig(kind="group_mean", length_penalty=0.5))
    assert advantage.compute(group) == pytest.approx([-0.1, 0.1])  # of rewards less 0.5 and 0.3


def test_what_is_overlong_does_not_count_as_successful() -> None:
    """The length penalty comes after: by the rewards that the overlong ones have left."""
    overlong = OverlongConfig(longest=20, buffer=5, penalty=2.0)
    advantage = load_advantage(AdvantageConfig(kind="group_mean", length_penalty=0.5, overlong=overlong))
    # 1.0, 1.0 and 1.0 - 2.0, whose mean is 1/3.
    found = advantage.compute(make_group([1.0, 1.0, 1.0], [10, 15, 30]))
    left = [1 - 0.5 / 3 * 10 / 15, 1 - 0.5 / 3, -1.0]
    assert found == pytest.approx([reward - sum(left) / 3 for reward in left])
