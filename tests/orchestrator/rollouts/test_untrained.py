"""Tokens left untrained: the mask reaches the samples whatever the branches are, survives every file, and is fixed at the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.inference.base import SamplingParameters
from counterpoint.orchestrator.rollouts.dump import DumpHeader, open_dump, write_dump
from counterpoint.orchestrator.rollouts.play import LoadedEnvironment, PolicyModel, play, score_group
from counterpoint.orchestrator.rollouts.rollout_file import framed, frames, parse_rollouts, rollout_buffers
from counterpoint.orchestrator.rollouts.trajectories import assemble_batch, merge_rollout
from counterpoint.orchestrator.step.advantages import load_advantage
from counterpoint.orchestrator.step.boundary import merge_all
from counterpoint.orchestrator.step.filters import apply_filters
from counterpoint.orchestrator.step.finalize import Finalizer
from counterpoint.orchestrator.step.merge_process import MergeProcess
from counterpoint.orchestrator.step.records import rollout_record
from counterpoint.orchestrator.step.step_metrics import additive_metrics
from counterpoint.run.config import AdvantageConfig, FilterConfig, GibberishFilter, RepetitionFilter
from counterpoint.transport.files.atomic import as_bytes_view
from counterpoint.transport.records import Int32Array, Rollout, Sample, Turn
from counterpoint.transport.validation import validate
from tests.support.rollouts import make_group, make_rollout, make_turn

finalize = Finalizer(load_advantage(AdvantageConfig()), [])

turns_of_agents = st.lists(
    st.tuples(
        st.integers(0, 2),  # which conversation it continues
        st.integers(1, 3),  # tokens of the environment
        st.integers(0, 5),  # tokens of the model
        st.lists(st.tuples(st.integers(-6, 6), st.integers(-6, 6) | st.none()), max_size=3),
    ),
    min_size=1,
    max_size=8,
)


@given(turns_of_agents)
def test_the_loss_mask_is_that_of_a_plain_count_of_each_token(
    plan: list[tuple[int, int, int, list[tuple[int, int | None]]]],
) -> None:
    """Every token of the model is a number of its own, so that an independent set says which ones train."""
    fresh = iter(range(1, 10_000))
    conversations: dict[int, list[int]] = {}
    turns: list[Turn] = []
    trains: set[int] = set()
    for agent, asked, answered, ranges in plan:
        prompt = [*conversations.get(agent, []), *(next(fresh) for _ in range(asked))]
        completion = [next(fresh) for _ in range(answered)]
        turn = make_turn(prompt, completion, log_probabilities=[-float(token) for token in completion])
        left = set()
        for start, stop in ranges:
            turn.leave_untrained(start, stop)
            left |= set(completion[start:stop])
        trains |= set(completion) - left
        assert turn.trained_tokens == len(completion) - len(left)
        turns.append(turn)
        conversations[agent] = prompt + completion
    samples = merge_rollout(make_rollout(turns=turns, advantage=1.5))
    for sample in samples:
        mask = [int(token in trains) for token in sample.token_ids_T.tolist()]
        assert sample.loss_mask_T.tolist() == mask
        assert sample.advantages_T.tolist() == [1.5 * bit for bit in mask]
        assert sample.log_probabilities_T.tolist() == [
            -float(token) * bit for token, bit in zip(sample.token_ids_T.tolist(), mask, strict=True)
        ]
    # Exactly the conversations with something to train, each trained token once.
    assert sorted(token for sample in samples for token in trained_ids(sample)) == sorted(trains)
    assert all(trained_ids(sample) for sample in samples)
    if samples:
        validate(assemble_batch("default", 1, samples))


def trained_ids(sample: Sample) -> list[int]:
    return cast(list[int], sample.token_ids_T[sample.loss_mask_T == 1].tolist())


def masked() -> Rollout:
    """Two turns in one branch, of which tokens 10 and 13 train."""
    first, second = make_turn([1, 2], [10, 11, 12], start=0), make_turn([1, 2, 10, 11, 12, 3], [13, 14], start=4)
    first.leave_untrained(1)
    second.leave_untrained(1, 2)
    return make_rollout(turns=[first, second])


def test_what_is_finalized_cannot_be_changed_any_more() -> None:
    rollout = masked()
    (own,) = finalize([rollout], False).rollouts
    rollout.turns[0].leave_untrained()
    (sample,) = merge_rollout(own)
    assert trained_ids(sample) == [10, 13]
    with pytest.raises(TypeError, match="finalized or from a file"):
        own.turns[0].leave_untrained()


def test_a_mask_of_another_length_fails_its_rollout_only() -> None:
    group = make_group([1.0, 0.0, 0.0])
    cast(bytearray, group[1].turns[0].untrained).extend(b"\1")
    cast(bytearray, group[2].turns[0].untrained).extend(b"\1\2\1")
    outcome = finalize(group, False)
    assert outcome.event.kept == 1
    assert "turn 0: untrained has 1 bytes for 3 completion_ids" in str(outcome.rollouts[1].error)
    assert "expected none, or a 0 or 1 each" in str(outcome.rollouts[2].error)


def test_a_rollout_without_a_trained_token_is_not_kept_and_still_counts_for_the_advantages() -> None:
    group = make_group([1.0, 0.0, 0.5])
    group[1].turns[0].leave_untrained()
    outcome = finalize(group, False)
    assert (outcome.event.kept, outcome.event.filtered) == (2, 1)
    assert [rollout.filtered_by for rollout in outcome.rollouts] == [None, "untrained", None]
    assert outcome.caught == {("untrained", "words"): 1}
    assert [rollout.advantage for rollout in outcome.rollouts] == [0.5, -0.5, 0.0]
    metrics = additive_metrics(outcome.rollouts)
    assert (metrics["tokens/completion"], metrics["tokens/untrained"], metrics["rollouts/filtered"]) == (9, 3, 1)


def test_filters_look_at_trained_tokens_only() -> None:
    bad = make_turn([1], [7] * 200, log_probabilities=[-50.0] * 200)
    filters: list[FilterConfig] = [
        GibberishFilter(mode="enforce", log_probability_below=-10.0),
        RepetitionFilter(mode="enforce"),
    ]
    for left, caught in ((0, "gibberish"), (190, None)):
        turn = replace(bad, untrained=bytearray())
        turn.leave_untrained(0, left)
        rollout = make_rollout(turns=[turn, make_turn([2], list(range(100)))])
        apply_filters(filters, [rollout])
        assert rollout.filtered_by == caught


def test_every_file_of_turns_has_the_mask(tmp_path: Path) -> None:
    rollout = masked()
    header = DumpHeader(run_id="default", step=1, shipped=1, state_columns={"toy": []})
    write_dump(tmp_path / "step_1", header, [rollout])
    (read,) = open_dump(tmp_path / "step_1").rollouts()
    assert [bytes(turn.untrained) for turn in read.turns] == [b"\0\1\1", b"\0\1"]
    (replayed,) = finalize([read], False).rollouts
    assert [trained_ids(sample) for sample in merge_rollout(replayed)] == [[10, 13]]
    line = orjson.loads(orjson.dumps(rollout_record(replayed, [])))
    assert [turn["untrained_tokens"] for turn in line["turns"]] == [2, 1]


def test_a_file_from_before_there_was_a_mask_trains_every_token() -> None:
    (frame, (turn_header, turn_arrays)) = frames(joined(make_rollout()))
    assert "untrained" not in {*turn_header, *turn_arrays}
    (read,) = parse_rollouts(joined(make_rollout()))
    assert read.turns[0].trained_tokens == 2
    turn_arrays["untrained"] = np.zeros(3, np.uint8)
    damaged = [*framed(*frame), *framed(turn_header, turn_arrays)]
    with pytest.raises(ValueError, match="untrained has 3 bytes for 2 completion_ids"):
        parse_rollouts(memoryview(b"".join(as_bytes_view(buffer) for buffer in damaged)))


def joined(rollout: Rollout) -> memoryview:
    return memoryview(b"".join(as_bytes_view(buffer) for buffer in rollout_buffers(rollout)))


@pytest.mark.slow
async def test_the_merge_process_knows_the_mask() -> None:
    async with MergeProcess() as merge:
        (there,) = await merge([masked()])
    (here,) = merge_all([masked()])
    assert there.loss_mask_T.tolist() == here.loss_mask_T.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert there.log_probabilities_T.tolist() == here.log_probabilities_T.tolist()


class Pool:
    """Completes every prompt with three tokens."""

    async def generate(
        self, prompt_ids: Int32Array, sampling: SamplingParameters, *, affinity: str, routed_experts_start: int = 0
    ) -> Turn:
        return make_turn(prompt_ids.tolist(), [5, 6, 7])


class Masking:
    """Leaves a token of its first turn untrained after the second, one when it is scored, one when its group is."""

    def __init__(self, group_scoring: bool) -> None:
        self.group_scoring = group_scoring

    def example(self, index: int) -> None:
        return None

    async def rollout(self, example: Any, model: PolicyModel, state: dict[str, Any]) -> None:
        turn = await model.generate([1])
        second = await model.generate([1, 5, 6, 7, 2])
        turn.leave_untrained(0, 1)
        second.leave_untrained()

    async def score(self, example: Any, rollout: Rollout) -> float:
        rollout.turns[0].leave_untrained(1, 2)
        return 1.0

    async def score_group(self, example: Any, rollouts: list[Rollout]) -> list[float]:
        for rollout in rollouts:
            rollout.turns[0].leave_untrained(2, 3)
        return [1.0] * len(rollouts)


@pytest.mark.parametrize(("group_scoring", "trained"), [(False, 7), (True, 6)])
async def test_it_holds_from_the_rollout_and_from_either_way_of_scoring(group_scoring: bool, trained: int) -> None:
    environment = cast(Any, Masking(group_scoring))
    loaded = LoadedEnvironment(EnvironmentConfig(name="masking", kind="unused"), environment)
    rollout = Rollout("0-0", 0, "masking", 0)
    sampling = SamplingParameters(temperature=1.0, max_tokens=8, stop_token_ids=(1,))
    await play(loaded, rollout, PolicyModel(rollout, cast(Chat, None), Pool(), sampling))
    if group_scoring:
        await score_group(loaded, [rollout])
    (own,) = finalize([rollout], group_scoring).rollouts
    (sample,) = merge_rollout(own)
    assert trained_ids(sample) == [trained]
    assert len(sample.token_ids_T) == 8
