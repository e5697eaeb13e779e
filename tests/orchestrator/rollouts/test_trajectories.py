"""Merging is exact: against an obvious, slow reference on lists, over turns that extend, fork, interleave and resend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.orchestrator.rollouts.trajectories import OpenBranches, assemble_batch, merge_rollout, merge_turns
from counterpoint.transport.records import REWARDS, Rollout, Sample, Turn
from counterpoint.transport.validation import validate

LAYERS, TOP_K = 2, 2


def make_turn(
    prompt: list[int],
    completion: list[int],
    *,
    version: int = 0,
    start: int | None = None,
    mark: int = 0,
    temperature: float = 1.0,
) -> Turn:
    """A turn whose routing row at position p is `mark * 1000 + p` in every entry, so that each row tells where it is from."""
    positions = range(start or 0, len(prompt) + len(completion) - 1)
    rows = np.array([mark * 1000 + position for position in positions], dtype=np.uint16)
    routing = np.broadcast_to(rows[:, None, None], (len(rows), LAYERS, TOP_K)).copy()
    return Turn(
        prompt_ids=np.array(prompt, dtype=np.int32),
        completion_ids=np.array(completion, dtype=np.int32),
        log_probabilities=np.array([-0.25 * (index + 1) - mark for index in range(len(completion))], dtype=np.float32),
        policy_version=version,
        finish_reason="stop",
        routed_experts=None if start is None else routing,
        routed_experts_start=start or 0,
        temperature=temperature,
    )


def make_rollout(turns: list[Turn]) -> Rollout:
    return Rollout("3-1", 3, "words", 7, turns=turns, reward=0.5, advantage=1.5)


@dataclass
class ReferenceBranch:
    temperature: float
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


def reference_merge(turns: list[Turn]) -> list[ReferenceBranch] | None:
    """The rules of `trajectories` in their plainest form; None when a row is missing."""
    branches: list[ReferenceBranch] = []
    for turn in turns:
        prompt, completion = turn.prompt_ids.tolist(), turn.completion_ids.tolist()
        fitting = [
            branch
            for branch in branches
            if prompt[: len(branch.tokens)] == branch.tokens and branch.temperature == turn.temperature
        ]
        branch = max(fitting, key=lambda branch: len(branch.tokens), default=ReferenceBranch(turn.temperature))
        rows = list(branch.rows)
        if turn.routed_experts is not None:
            start = turn.routed_experts_start
            if start > len(rows):
                lenders = [
                    other
                    for other in branches
                    if start <= len(other.rows) and start <= len(prompt) and other.tokens[:start] == prompt[:start]
                ]
                if not lenders:
                    return None
                rows += lenders[0].rows[len(rows) : start]
            rows += turn.routed_experts[len(rows) - start :, 0, 0].tolist()
        if not fitting:
            branches.append(branch)
        gap = len(prompt) - len(branch.tokens)
        branch.mask += [0] * gap + [1] * len(completion)
        branch.log_probabilities += [0.0] * gap + turn.log_probabilities.tolist()
        branch.tokens = prompt + completion
        branch.rows = rows
        branch.versions.append(turn.policy_version)
    return [branch for branch in branches if 1 in branch.mask]


few_tokens = st.lists(st.integers(0, 1), max_size=4)


@st.composite
def turns_strategy(draw: st.DrawFn) -> list[Turn]:
    """Turns whose prompts extend, repeat or cut what came before, in an alphabet so small that matches by chance are common."""
    routed = draw(st.booleans())
    sequences: list[list[int]] = []
    turns: list[Turn] = []
    for mark in range(draw(st.integers(1, 7))):
        origin: list[int] = []
        if sequences and draw(st.integers(0, 4)) > 0:
            origin = draw(st.sampled_from(sequences))
        if draw(st.integers(0, 3)) == 0:
            origin = origin[: draw(st.integers(0, len(origin)))]
        prompt = origin + draw(few_tokens)
        prompt = prompt or [0]
        completion = draw(few_tokens)
        last_row = len(prompt) + len(completion) - 1
        start: int | None = None
        if routed:
            choices = [0, 0, *[min(len(sequence) - 1, last_row) for sequence in sequences]]
            start = draw(st.sampled_from([*choices, draw(st.integers(0, last_row))]))
        version, temperature = draw(st.integers(0, 5)), draw(st.sampled_from([1.0, 1.0, 0.5]))
        turns.append(make_turn(prompt, completion, version=version, start=start, mark=mark, temperature=temperature))
        sequences.append(prompt + completion)
    return turns


@given(turns_strategy())
def test_merging_equals_the_reference(turns: list[Turn]) -> None:
    expected = reference_merge(turns)
    if expected is None:
        with pytest.raises(ValueError, match="missing"):
            merge_rollout(make_rollout(turns))
        return
    samples = merge_rollout(make_rollout(turns))
    assert len(samples) == len(expected)
    for sample, branch in zip(samples, expected, strict=True):
        assert sample.token_ids_T.tolist() == branch.tokens
        assert sample.loss_mask_T.tolist() == branch.mask
        assert sample.log_probabilities_T.tolist() == branch.log_probabilities
        assert sample.advantages_T.tolist() == [1.5 * bit for bit in branch.mask]
        assert (sample.policy_version, sample.temperature) == (min(branch.versions), branch.temperature)
        assert routing_of(sample) == branch.rows


@given(turns_strategy())
def test_every_completion_token_trains_exactly_once_and_the_batch_is_valid(turns: list[Turn]) -> None:
    if reference_merge(turns) is None:
        return
    samples = merge_rollout(make_rollout(turns))
    written = sum(len(turn.completion_ids) for turn in turns)
    assert sum(int(sample.loss_mask_T.sum()) for sample in samples) == written
    if samples:
        batch = assemble_batch("default", 4, samples)
        validate(batch)
        assert [info.temperature for info in batch.samples] == [sample.temperature for sample in samples]
        for index, sample in enumerate(samples):
            place = slice(batch.sample_offsets[index], batch.sample_offsets[index + 1])
            for name in ("token_ids_T", "loss_mask_T", "log_probabilities_T", "advantages_T"):
                assert np.array_equal(getattr(batch, name)[place], getattr(sample, name))
                assert getattr(batch, name).dtype == getattr(sample, name).dtype


@given(turns_strategy(), st.data())
def test_what_a_turn_is_worth_goes_with_its_tokens_wherever_they_are_trained_once(
    turns: list[Turn], data: st.DataObject
) -> None:
    """Each log-probability tells its turn and place. The return from a token on is that of its turn in the whole rollout."""
    if reference_merge(turns) is None:
        return
    rollout = make_rollout(turns)
    rewards = [data.draw(st.integers(-8, 8)) / 4 for _ in turns]
    rollout.turn_rewards = np.array(rewards, np.float32)
    rollout.turn_advantages = np.array([data.draw(st.floats(-9, 9, width=32)) for _ in turns], np.float32)
    for turn in turns:
        if data.draw(st.integers(0, 4)) == 0:
            turn.leave_untrained(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4)))
    expected = sorted(
        (-float(value), float(rollout.turn_advantages[number]), sum(rewards[number:]))
        for number, turn in enumerate(turns)
        for value, untrained in zip(turn.log_probabilities, turn.untrained or bytes(9), strict=False)
        if not untrained
    )
    samples = merge_rollout(rollout)
    found = []
    for index, sample in enumerate(samples):
        batch = assemble_batch("default", 4, samples, with_rewards=True)
        place = slice(batch.sample_offsets[index], batch.sample_offsets[index + 1])
        given_T = batch.columns[REWARDS][place]
        assert not given_T[sample.loss_mask_T == 0].any()
        assert not sample.advantages_T[sample.loss_mask_T == 0].any()
        for position in sample.loss_mask_T.nonzero()[0]:
            probability, advantage = sample.log_probabilities_T[position], batch.advantages_T[place][position]
            found.append((-float(probability), float(advantage), float(given_T[position:].sum())))
    assert sorted(found) == expected


@pytest.mark.parametrize("players", [{}, {"a": 1.0, "b": 2.0}])
def test_rewards_of_turns_are_read_as_often_however_many_branches_there_are(players: dict[str, float]) -> None:
    class Counted(list[Turn]):
        passes = 0

        def __iter__(self) -> Iterator[Turn]:
            self.passes += 1
            return super().__iter__()

    def passes(count: int) -> int:
        played = [make_turn([1, index], [3]) for index in range(count)]
        names = "ab" * count if players else [""] * count
        turns = Counted(replace(turn, player=name) for turn, name in zip(played, names, strict=False))
        rollout = make_rollout(turns)
        rollout.turn_rewards, rollout.player_rewards = np.ones(count, np.float32), players
        merge_turns(rollout)
        turns.passes = 0
        samples = merge_rollout(rollout)
        left = [(count - index + 1) // 2 if players else count - index for index in range(count)]
        assert [sample.turn_rewards for sample in samples] == [((2, float(each)),) for each in left]
        return turns.passes

    assert passes(2) == passes(20)


@given(turns_strategy())
def test_leaving_out_the_rows_held_never_leaves_a_gap(turns: list[Turn]) -> None:
    branches = OpenBranches()
    for mark, turn in enumerate(turns):
        prompt, completion = turn.prompt_ids.tolist(), turn.completion_ids.tolist()
        branch = branches.add(
            make_turn(
                prompt,
                completion,
                start=branches.rows_held(turn.prompt_ids),
                mark=mark,
                temperature=turn.temperature,
            ),
        )
        assert branch.rows == branch.length - 1


def routing_of(sample: Sample) -> list[int]:
    return [int(row) for chunk in sample.routed_experts for row in chunk[:, 0, 0]]


def test_the_row_missing_at_the_end_of_a_turn_comes_from_the_next() -> None:
    first = make_turn([1, 2], [3, 4], start=0, mark=1)
    second = make_turn([1, 2, 3, 4, 5], [6], start=3, mark=2)
    (sample,) = merge_rollout(make_rollout([first, second]))
    assert routing_of(sample) == [1000, 1001, 1002, 2003, 2004]


def test_routing_is_kept_by_reference() -> None:
    first = make_turn([1, 2], [3, 4], start=0)
    resent = make_turn([1, 2, 3, 4, 5], [6], start=0)
    (sample,) = merge_rollout(make_rollout([first, resent]))
    assert [len(chunk) for chunk in sample.routed_experts] == [3, 2]
    for chunk, turn in zip(sample.routed_experts, (first, resent), strict=True):
        assert turn.routed_experts is not None
        assert np.shares_memory(chunk, turn.routed_experts)


def test_two_calls_at_once_from_one_state_give_two_samples_that_share_rows() -> None:
    root = make_turn([1, 2], [3], start=0, mark=1)
    left = make_turn([1, 2, 3, 4], [5], start=2, mark=2)
    right = make_turn([1, 2, 3, 6], [7], start=2, mark=3)
    first, second = merge_rollout(make_rollout([root, left, right]))
    assert routing_of(first) == [1000, 1001, 2002, 2003]
    assert routing_of(second) == [1000, 1001, 3002, 3003]
    assert second.loss_mask_T.tolist() == [0, 0, 0, 0, 1]


def test_turns_of_two_temperatures_are_two_samples_that_share_rows() -> None:
    hot = make_turn([1, 2], [3], start=0, mark=1)
    cold = make_turn([1, 2, 3, 4], [5], start=2, mark=2, temperature=0.5)
    first, second = merge_rollout(make_rollout([hot, cold]))
    assert [first.temperature, second.temperature] == [1.0, 0.5]
    assert routing_of(second) == [1000, 1001, 2002, 2003]
    assert second.loss_mask_T.tolist() == [0, 0, 0, 0, 1]


def test_a_gap_in_the_routing_names_the_missing_rows() -> None:
    turns = [make_turn([1, 2], [3], start=0), make_turn([1, 2, 3, 4, 5], [6], start=4)]
    with pytest.raises(ValueError, match="rows 2 to 3 are missing"):
        merge_rollout(make_rollout(turns))


def test_a_refused_turn_leaves_the_branches_as_they_were() -> None:
    branches = OpenBranches()
    branches.add(make_turn([1, 2], [3], start=0))
    with pytest.raises(ValueError, match="missing"):
        branches.add(make_turn([9, 8], [7], start=1))
    assert len(branches.branches) == 1
    assert branches.rows_held(np.array([1, 2, 3, 4], dtype=np.int32)) == 2


def test_a_wrong_number_of_rows_is_refused() -> None:
    turn = make_turn([1, 2], [3], start=1)
    object.__setattr__(turn, "routed_experts_start", 0)
    with pytest.raises(ValueError, match=r"\b1 rows .*\b0\b.*\b3 tokens .*\b2$"):
        OpenBranches().add(turn)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        OpenBranches().add(make_turn([], [1, 2]))


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="run default, step 4"):
        assemble_batch("default", 4, [])


def test_agents_that_share_a_long_prefix_are_told_apart_without_comparing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing every prompt with every branch would be quadratic: 40 agents, 10 turns each, all sharing 1,000 tokens."""
    compared = 0
    array_equal = np.array_equal

    def counting(left: np.ndarray, right: np.ndarray) -> bool:
        nonlocal compared
        compared += len(left)
        return array_equal(left, right)

    monkeypatch.setattr(np, "array_equal", counting)
    shared = list(range(1000))
    histories = [[*shared, 5000 + agent] for agent in range(40)]
    turns = []
    for step in range(10):
        for agent, history in enumerate(histories):
            turn = make_turn(list(history), [agent, step, 1])
            history += [agent, step, 1, 2]
            turns.append(turn)
    assert len(merge_rollout(make_rollout(turns))) == 40
    assert compared <= sum(len(turn.prompt_ids) for turn in turns)
