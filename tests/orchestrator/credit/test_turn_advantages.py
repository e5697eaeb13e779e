"""Advantages of turns: unbiased by exact enumeration in fractions, by their definitions, and through checks, penalties, players.

The enumeration plays every group of a small decision process with its probability, through the real functions, and compares the
expected update of each parameter with the true policy gradient. Nothing is sampled, and nothing rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.orchestrator.credit.turn_advantages import anchor_states, discounted, turn_returns
from counterpoint.orchestrator.rollouts.trajectories import assemble_batch, merge_rollout
from counterpoint.orchestrator.scheduling.outcomes import DropReason
from counterpoint.orchestrator.step.advantages import (
    BUILT_IN,
    STATES,
    Advantage,
    AdvantageError,
    AdvantageInputs,
    AdvantageOutputs,
    load_advantage,
)
from counterpoint.orchestrator.step.batch_form import choose_trained
from counterpoint.orchestrator.step.filters import has_zero_advantage
from counterpoint.orchestrator.step.finalize import finalize_group
from counterpoint.orchestrator.step.players import set_advantages
from counterpoint.run.config import AdvantageConfig, OverlongConfig
from counterpoint.run.loss import LossConfig
from counterpoint.transport.records import REWARDS, Rollout
from tests.support.rollouts import make_rollout, make_turn

PROCESS: dict[str, list[tuple[Fraction, Fraction, str | None]]] = {
    "start": [
        (Fraction(1, 2), Fraction(3, 4), None),
        (Fraction(1, 3), Fraction(-1, 4), "hall"),
        (Fraction(1, 6), Fraction(1), "room"),
    ],
    "hall": [(Fraction(2, 5), Fraction(2), None), (Fraction(3, 5), Fraction(1, 2), "room")],
    "room": [(Fraction(1, 4), Fraction(-1), None), (Fraction(3, 4), Fraction(3), None)],
}
"""Of each state the actions: their probability, their reward, and the state after them, None at the end. The room is the second
turn's state or the third's, and a rollout has one to three turns by what its policy chooses."""

Path = tuple[tuple[str, int], ...]
Update = dict[tuple[str, int], Fraction]
"""Maps a state and an action to the change of its logit, which is a parameter."""
Rewards = Sequence[npt.NDArray[Any]]
States = Sequence[Sequence[str]]


def paths(state: str | None = "start") -> Iterator[Path]:
    """All rollouts, as the states of their turns with the actions chosen there."""
    if state is None:
        yield ()
        return
    for action, (_, _, following) in enumerate(PROCESS[state]):
        for rest in paths(following):
            yield ((state, action), *rest)


def probability(path: Path) -> Fraction:
    result = Fraction(1)
    for state, action in path:
        result *= PROCESS[state][action][0]
    return result


def rewards_of(path: Path) -> npt.NDArray[Any]:
    return np.array([PROCESS[state][action][1] for state, action in path], dtype=object)


def add_scores(update: Update, path: Path, weights: Sequence[Fraction]) -> None:
    """Adds each turn's gradient of its log-probability, times its weight."""
    for (state, chosen), weight in zip(path, weights, strict=True):
        for action, (likely, _, _) in enumerate(PROCESS[state]):
            update[state, action] = update.get((state, action), Fraction(0)) + weight * ((action == chosen) - likely)


def gradient(weigh: Callable[[npt.NDArray[Any]], Sequence[Fraction]]) -> Update:
    """The expected sum of scores times `weigh` of the rewards of one rollout."""
    result: Update = {}
    for path in paths():
        add_scores(result, path, [probability(path) * weight for weight in weigh(rewards_of(path))])
    return result


def true_gradient() -> Update:
    """Returns the gradient of the expected sum of rewards by its definition: each turn's score times the whole sum."""
    return gradient(lambda rewards: [Fraction(rewards.sum())] * len(rewards))


def expected_update(group_size: int, advantages: Callable[[Rewards, States], Rewards]) -> Update:
    """The mean over a group's rollouts, expected over all groups."""
    result: Update = {}
    for group in product(list(paths()), repeat=group_size):
        share = Fraction(1, group_size)
        for path in group:
            share *= probability(path)
        found = advantages([rewards_of(path) for path in group], [[state for state, _ in path] for path in group])
        for path, own in zip(group, found, strict=True):
            add_scores(result, path, [share * Fraction(value) for value in own])
    return result


def of_returns(discount: Any = 1) -> Callable[[Rewards, States], Rewards]:
    return lambda rewards, _: turn_returns(rewards, discount)


def of_states(rewards: Rewards, states: States) -> Rewards:
    return anchor_states(rewards, states, 1)


def held(rewards: Rewards, _: States, ended: Callable[[npt.NDArray[Any]], Sequence[Any]]) -> Rewards:
    """`turn_returns` in its plainest form, where a sibling that has ended counts with the values of `ended`, if any."""
    returns = [discounted(own, 1) for own in rewards]
    result = []
    for index, own in enumerate(returns):
        others = returns[:index] + returns[index + 1 :]
        above = []
        for turn, value in enumerate(own):
            compared = [
                each for other in others for each in (other[turn : turn + 1] if turn < len(other) else ended(other))
            ]
            above.append(value - (sum(compared) / Fraction(len(compared)) if compared else 0))
        result.append(np.array(above, dtype=object))
    return result


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize(
    "advantages",
    [
        of_returns(),
        of_states,
        partial(held, ended=lambda _: [Fraction(0)]),
        partial(held, ended=lambda _: []),
    ],
    ids=["turn_returns", "anchor_states", "a sibling that has ended has no return", "and is left out"],
)
def test_the_expected_update_is_the_policy_gradient(
    group_size: int, advantages: Callable[[Rewards, States], Rewards]
) -> None:
    """Whatever an ended sibling counts: it says nothing of the rollout. We chose by what is left without rewards of turns."""
    assert expected_update(group_size, advantages) == true_gradient()


def test_the_sibling_that_has_ended_counts_with_its_last_turn() -> None:
    group = [np.array([1.0, 2.0, 4.0]), np.array([8.0]), np.array([16.0, 32.0])]
    expected = held(group, [[]] * 3, lambda other: list(other[-1:]))
    for found, wanted in zip(turn_returns(group, 1), expected, strict=True):
        assert found.tolist() == wanted.tolist()


def centred_before_the_sum(rewards: Rewards, _: States) -> Rewards:
    """verl #7244: the others' mean reward of a turn's number is subtracted from each reward, and then these are summed."""
    result = []
    for index, own in enumerate(rewards):
        others = [*rewards[:index], *rewards[index + 1 :]]
        above = own.copy()
        for turn in range(len(own)):
            above[turn] -= sum(other[turn] for other in others if turn < len(other)) / Fraction(len(others))
        result.append(discounted(above, 1))
    return result


def test_means_subtracted_before_the_sum_charge_for_another_turn() -> None:
    """The bias has a closed form: the gradient is that of rewards minus, for each turn that is played, its mean reward."""
    means = [
        sum(probability(path) * rewards_of(path)[turn] for path in paths() if turn < len(path)) for turn in range(3)
    ]
    assert means[1] > 0
    found = expected_update(3, centred_before_the_sum)
    assert found == gradient(lambda rewards: [Fraction((rewards - means[: len(rewards)]).sum())] * len(rewards))
    assert found != true_gradient()


def scales(found: Update) -> set[Fraction]:
    return {found[parameter] / true for parameter, true in true_gradient().items() if true}


def test_a_mean_with_the_turns_own_return_scales_turns_differently() -> None:
    """Over those that are still there, late turns have fewer siblings. With ended ones as 0 it is one scale: (n - 1) / n."""

    def still_there(rewards: Rewards, _: States) -> Rewards:
        returns = [discounted(own, 1) for own in rewards]
        means = []
        for turn in range(max(map(len, returns))):
            there = [own[turn] for own in returns if turn < len(own)]
            means.append(sum(there) / Fraction(len(there)))
        return [own - means[: len(own)] for own in returns]

    assert len(scales(expected_update(3, still_there))) > 1
    assert scales(
        expected_update(3, lambda rewards, _: [own * Fraction(2, 3) for own in turn_returns(rewards, 1)])
    ) == {Fraction(2, 3)}


def test_a_discount_is_the_gradient_of_no_discounted_objective() -> None:
    half_as_much: Any = Fraction(1, 2)
    half = expected_update(2, of_returns(half_as_much))
    assert half == gradient(lambda rewards: list(discounted(rewards, half_as_much)))
    weights = np.array([1, Fraction(1, 2), Fraction(1, 4)], dtype=object)
    assert half != gradient(lambda rewards: [Fraction((rewards * weights[: len(rewards)]).sum())] * len(rewards))
    assert half != true_gradient()


# --- through the orchestrator's own types ---


def rollout_of(rewards: Sequence[float] | None, index: int = 0, turns: int = 0, **fields: Any) -> Rollout:
    count = turns or len(rewards or ())
    given = None if rewards is None else np.array(rewards, np.float32)
    played = [make_turn([1, 2 + turn], [7, 8]) for turn in range(count)]
    reward = fields.pop("reward", 0.0 if given is None else float(given.sum()))
    return make_rollout(5, index, turns=played, reward=reward, turn_rewards=given, **fields)


def finalized(kind: str, group: list[Rollout], **keys: Any) -> list[Rollout]:
    set_advantages(load_advantage(AdvantageConfig(kind=kind, **keys)), group)
    return group


def advantages_of(rollouts: Sequence[Rollout]) -> list[list[float]]:
    assert all(each.turn_advantages is not None and each.turn_advantages.dtype == np.float32 for each in rollouts)
    return [each.turn_advantages.tolist() for each in rollouts if each.turn_advantages is not None]


eighths = st.integers(-40, 40).map(lambda number: number / 8)
groups = st.sampled_from([2, 3, 5]).flatmap(
    lambda size: st.lists(st.lists(eighths, min_size=1, max_size=5), min_size=size, max_size=size)
)


@given(groups)
def test_what_a_group_gets_is_the_definition_exactly(group: list[list[float]]) -> None:
    rollouts = finalized("turn_returns", [rollout_of(own, index) for index, own in enumerate(group)])
    expected = held([np.array(own) for own in group], [], lambda other: list(other[-1:]))
    assert advantages_of(rollouts) == [[float(np.float32(value)) for value in own] for own in expected]
    for rollout, own in zip(rollouts, advantages_of(rollouts), strict=True):
        assert np.float32(rollout.advantage) == max(own, key=abs)
        assert rollout.advantage_kind == "turn_returns"


@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(1, 6)), min_size=1, max_size=9))
def test_without_rewards_of_turns_it_is_leave_one_out_at_each(group: list[tuple[float, int]]) -> None:
    rollouts = [rollout_of(None, index, turns=turns, reward=reward) for index, (reward, turns) in enumerate(group)]
    by_turn = load_advantage(AdvantageConfig(kind="turn_returns")).compute(rollouts)
    once = load_advantage(AdvantageConfig(kind="leave_one_out")).compute(rollouts)
    for (_, turns), own, one in zip(group, by_turn, once, strict=True):
        assert np.asarray(own).tolist() == pytest.approx([one] * turns, rel=1e-12, abs=1e-12)


@given(groups, st.data())
def test_anchor_states_compares_with_the_others_turns_in_the_same_state(
    group: list[list[float]], data: st.DataObject
) -> None:
    states = [[data.draw(st.sampled_from("abc")) for _ in own] for own in group]
    rollouts = [rollout_of(own, index, state={STATES: states[index]}) for index, own in enumerate(group)]
    found = load_advantage(AdvantageConfig(kind="anchor_states")).compute(rollouts)
    returns = [discounted(np.array(own), 1) for own in group]
    by_number = turn_returns([np.array(own) for own in group], 1)
    for index, own in enumerate(states):
        for turn, state in enumerate(own):
            alike = [
                returns[other][there]
                for other in range(len(group))
                for there in range(len(states[other]))
                if other != index and states[other][there] == state
            ]
            expected = returns[index][turn] - sum(alike) / len(alike) if alike else by_number[index][turn]
            assert np.asarray(found[index])[turn] == pytest.approx(expected, abs=1e-12)


def test_a_state_is_the_prompts_tokens_where_the_environment_notes_none() -> None:
    group = [rollout_of([0.0, 1.0]), rollout_of([0.0, 3.0], 1), rollout_of([0.0, 8.0], 2)]
    group[0].turns[1] = make_turn([9], [7])
    assert advantages_of(finalized("anchor_states", group)) == [[-4.5, -4.5], [-1.5, -5.0], [6.0, 5.0]]


@pytest.mark.parametrize("states", [["a"], "ab", {"a": 1}])
def test_states_that_are_not_one_a_turn_are_refused_by_place(states: Any) -> None:
    with pytest.raises(
        AdvantageError, match=r"rollout 5-0: state\['turn_states'\] has .* for 2 turns; expected a list"
    ):
        finalized("anchor_states", [rollout_of([0.0, 1.0], state={STATES: states})])


@pytest.mark.parametrize(
    ("states", "fault"),
    [
        (["a"], r"state['turn_states'] has 1 values for 2 turns; expected a list"),
        ({"a": 1}, r"state['turn_states'] has dict for 2 turns; expected a list"),
        (["a", "\ud800"], r"state['turn_states'][1] is no JSON: "),
        ([{1, 2}, "a"], r"state['turn_states'][0] is no JSON: "),
    ],
)
def test_states_that_are_wrong_fail_their_rollout_alone(states: Any, fault: str) -> None:
    def group() -> list[Rollout]:
        wrong = rollout_of([0.0, 9.0], 2, state={STATES: states})
        return [rollout_of([0.0, 1.0]), rollout_of([0.0, 3.0], 1), wrong]

    alone = finalize_group(group(), load_advantage(AdvantageConfig(kind="anchor_states")), [])
    assert (alone.event.dropped, alone.event.kept, alone.failed) == (None, 2, 1)
    assert [each.error is None for each in alone.rollouts] == [True, True, False]
    assert str(alone.rollouts[2].error).startswith(f"StateError: {fault}")
    assert advantages_of(alone.rollouts[:2]) == [[-2.0, -2.0], [2.0, 2.0]]

    as_one = finalize_group(group(), load_advantage(AdvantageConfig(kind="anchor_states")), [], group_scoring=True)
    assert as_one.event.dropped is DropReason.INCOMPLETE
    others = finalize_group(group(), load_advantage(AdvantageConfig(kind="turn_returns")), [])
    assert others.event.kept == 3, "who does not read them does not mind"


def test_a_state_may_be_whatever_the_state_of_a_rollout_may_hold() -> None:
    states: list[Any] = [{"seed": 2**80, 7: np.float32(0.5)}, {"seed": 2**80 + 1, 7: np.float32(0.5)}]
    group = [rollout_of([4.0, 1.0], state={STATES: states}), rollout_of([8.0, 2.0], 1, state={STATES: states[::-1]})]
    assert advantages_of(finalized("anchor_states", group)) == [[3.0, -9.0], [9.0, -3.0]]


def test_a_discount_is_from_one_turn_to_the_next() -> None:
    group = [rollout_of([1.0, 2.0, 4.0]), rollout_of([0.0], 1)]
    assert advantages_of(finalized("turn_returns", group, discount=0.5)) == [[3.0, 4.0, 4.0], [-3.0]]


@pytest.mark.parametrize("kind", sorted(BUILT_IN))
def test_equal_rewards_of_turns_give_exactly_zero_and_are_filtered(kind: str) -> None:
    group = finalized(kind, [rollout_of([0.1, 0.2]), rollout_of([0.1, 0.2], 1)])
    choose_trained(1, group, load_advantage(AdvantageConfig(kind=kind)))
    assert all(map(has_zero_advantage, group))


def test_equal_totals_are_learned_from_where_turns_differ() -> None:
    group = finalized("turn_returns", [rollout_of([1.0, 0.0]), rollout_of([0.0, 1.0], 1)])
    assert advantages_of(group) == [[0.0, -1.0], [0.0, 1.0]]
    assert not any(map(has_zero_advantage, group))
    group[0].turns[1].leave_untrained()
    assert [has_zero_advantage(each) for each in group] == [True, False], "only what is trained counts"


@pytest.mark.parametrize(
    "keys", [{"length_penalty": 0.5}, {"overlong": OverlongConfig(longest=2, buffer=1, penalty=0.5)}]
)
def test_a_penalty_is_part_of_the_return_from_each_turn(keys: dict[str, Any]) -> None:
    """It depends on all turns, and so is subtracted from the last one's reward. The records keep the rewards."""
    group = [rollout_of([1.0, 0.0]), rollout_of([1.0, 0.0], 1)]
    group[1].turns[1] = make_turn([1, 3], [7])
    group[0].turns[0] = make_turn([1, 3], [7, 8] if "overlong" in keys else [7])
    group[1].turns[0] = make_turn([1, 3], [7])
    for rollout, own in zip(finalized("turn_returns", group, **keys), advantages_of(group), strict=True):
        assert own[0] == own[1] != 0
        assert rollout.turn_rewards is not None
        assert rollout.turn_rewards.tolist() == [1.0, 0.0]
    assert group[0].advantage < 0 < group[1].advantage


def of_own(*values: Any) -> Advantage:
    return Advantage("mine", lambda inputs: AdvantageOutputs(list(values)))


def test_a_function_of_ones_own_returns_a_number_or_one_a_turn() -> None:
    group = [rollout_of([0.0, 1.0]), rollout_of([2.0], 1), rollout_of([3.0, 4.0], 2)]
    set_advantages(of_own([0.5, -2], 1, np.array([0.0, 0.25], np.float32)), group)
    assert [each.advantage for each in group] == [-2.0, 1.0, 0.25]
    assert [None if each.turn_advantages is None else each.turn_advantages.tolist() for each in group] == [
        [0.5, -2.0],
        None,
        [0.0, 0.25],
    ]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1.0], r"returned 1 numbers for rollout 5-1, which has 2 turns; expected one each"),
        ([], r"returned 0 numbers for rollout 5-1"),
        ([0.0, float("nan")], r"returned nan for rollout 5-1 at turn 1; expected a finite number"),
        (np.array([np.inf, 0.0]), r"returned .*inf.* for rollout 5-1 at turn 0"),
        ([0.0, "1"], r"returned '1' for rollout 5-1 at turn 1"),
        (np.zeros((2, 2)), r"returned array.* for rollout 5-1; expected a finite number"),
    ],
)
def test_a_number_of_a_turn_that_cannot_be_trained_on_is_refused_by_place(value: Any, said: str) -> None:
    with pytest.raises(AdvantageError, match=f"(?s)'mine' {said}"):
        of_own(0.0, value).compute([rollout_of([0.0, 1.0]), rollout_of([0.0, 1.0], 1)])


def test_numbers_of_turns_are_refused_where_the_loss_would_mix_them() -> None:
    group = [rollout_of([0.0, 1.0]), rollout_of([2.0], 1)]
    advantage = replace(of_own(0.0, [1.0]), one_number=True)
    with pytest.raises(AdvantageError, match=r"a number for each turn of rollout 5-1, .*ratio_level = \"token\""):
        advantage.compute(group)
    assert load_advantage(AdvantageConfig(), LossConfig(kind="rloo")).one_number
    assert not load_advantage(AdvantageConfig(), LossConfig(kind="reinforce")).one_number


def test_a_function_sees_the_rewards_of_turns_and_cannot_change_them() -> None:
    def own(inputs: AdvantageInputs) -> AdvantageOutputs:
        found = [rewards * inputs.discount for rewards in inputs.turn_rewards]
        for rollout in inputs.rollouts:
            if rollout.turn_rewards is not None:
                rollout.turn_rewards[:] = 9.0
        return AdvantageOutputs(found)

    group = [rollout_of([1.0, 2.0]), rollout_of(None, 1, turns=2, reward=4.0)]
    set_advantages(Advantage("mine", own, discount=0.5), group)
    assert advantages_of(group) == [[0.5, 1.0], [0.0, 2.0]]
    assert group[0].turn_rewards is not None
    assert group[0].turn_rewards.tolist() == [1.0, 2.0]


def test_after_a_change_of_the_kind_turns_keep_their_advantages() -> None:
    """A function over a step is applied to the rollouts alone that were finalized with it, and they have one number each."""
    before = finalized("turn_returns", [rollout_of([1.0, 0.0]), rollout_of([0.0, 1.0], 1)])
    after = finalized("batch_standardised", [rollout_of([1.0, 3.0]), rollout_of([0.0, 0.0], 1)])
    choose_trained(1, [*before, *after], load_advantage(AdvantageConfig(kind="batch_standardised")))
    assert advantages_of(before) == [[0.0, -1.0], [0.0, 1.0]]
    assert [(each.advantage, each.turn_advantages) for each in after] == [(1.0, None), (-1.0, None)]


def test_each_players_turns_are_compared_with_the_same_players() -> None:
    """A turn's number is the one among its player's turns, and turns of no player are not trained."""
    group = []
    for index, rewards in enumerate([[1.0, 0.0, 4.0, 2.0], [3.0, 8.0, 0.0, 0.0]]):
        rollout = rollout_of(rewards, index, state={STATES: ["a", "b", "c", "d"]})
        rollout.turns = [
            make_turn([1, number], [7], player=player) for number, player in enumerate(["white", "black", "white", ""])
        ]
        rollout.player_rewards = {"white": rewards[0] + rewards[2], "black": rewards[1]}
        rollout.turns[3].leave_untrained()
        group.append(rollout)
    for kind in ("turn_returns", "anchor_states"):
        assert advantages_of(finalized(kind, group)) == [[2.0, -8.0, 4.0, 0.0], [-2.0, 8.0, -4.0, 0.0]]
        assert [each.player_advantages for each in group] == [
            {"black": -8.0, "white": 4.0},
            {"black": 8.0, "white": -4.0},
        ]
        assert [each.advantage for each in group] == [-8.0, 8.0]
    white, black = merge_rollout(group[0]), merge_rollout(group[1])
    assert [sample.advantages_T[-1] for sample in white[:3]] == [2.0, -8.0, 4.0]
    assert [sample.turn_rewards for sample in white[:3]] == [((2, 5.0),), ((2, 0.0),), ((2, 4.0),)]
    assert [sample.turn_rewards for sample in black[:2]] == [((2, 3.0),), ((2, 8.0),)]


def test_a_batch_has_rewards_only_for_a_value_head_and_where_turns_have_some() -> None:
    with_turns, without = rollout_of([1.0, 2.0]), rollout_of(None, 1, turns=1, reward=4.0)
    samples = [sample for rollout in (with_turns, without) for sample in merge_rollout(rollout)]
    assert REWARDS not in assemble_batch("one", 1, samples).columns
    assert REWARDS not in assemble_batch("one", 1, samples[2:], with_rewards=True).columns
    batch = assemble_batch("one", 1, samples, with_rewards=True)
    assert batch.columns[REWARDS].tolist() == [0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 4]
    assert batch.of_loss == []
