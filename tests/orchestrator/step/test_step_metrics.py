"""A step's metrics: those that need more than counting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from counterpoint.orchestrator.rollouts.trajectories import assemble_batch, merge_rollout
from counterpoint.orchestrator.step.step_metrics import step_metrics, turns_of
from tests.support.rollouts import make_rollout, make_turn


def test_the_length_is_of_the_completed_rollouts_and_all_their_turns() -> None:
    turn = make_turn([1], [4, 5])
    completed = make_rollout(0, 0, turns=[turn, turn])
    failed = make_rollout(0, 1, turns=[turn], reward=None, error="KeyError: gone")
    line = step_metrics(assemble_batch("one", 1, merge_rollout(completed)), [completed, failed, failed])
    assert (line["length/mean"], line["tokens/completion"]) == (4, 8)


def test_the_cache_hit_share_is_of_the_turns_whose_server_tells() -> None:
    turn = make_turn(range(1, 11), [4, 5])
    cached = [make_rollout(0, index, turns=[replace(turn, cached_tokens=8 * index)]) for index in range(2)]
    silent = make_rollout(0, 2, turns=[turn])
    batch = assemble_batch("one", 1, [sample for rollout in cached for sample in merge_rollout(rollout)])
    assert step_metrics(batch, [*cached, silent])["inference/cache_hit_share"] == pytest.approx(8 / 20)
    assert "inference/cache_hit_share" not in step_metrics(batch, [silent])


def test_the_reward_of_a_turn_is_by_its_number_and_the_names_are_bounded() -> None:
    turn = make_turn([1], [4, 5])
    of_turns = [np.array(values, np.float32) for values in ([1.0, 0.5], [0.0], [2.0] * 4000)]
    rollouts = [
        make_rollout(0, index, turns=[turn] * len(values), turn_rewards=values, reward=float(values.sum()))
        for index, values in enumerate(of_turns)
    ]
    rollouts += [make_rollout(0, 3), make_rollout(0, 4, environment="others", turn_rewards=np.ones(1, np.float32))]
    line = step_metrics(assemble_batch("one", 1, merge_rollout(rollouts[0])), rollouts)
    found = {name.removeprefix("reward/toy/turn/"): value for name, value in line.items() if "toy/turn/" in name}
    assert len(found) == 16
    assert (found["1/mean"], found["2/mean"], found["3/mean"], found["1025-/mean"]) == (1.0, 1.25, 2.0, 2.0)
    assert line["reward/others/turn/1/mean"] == 1.0
    assert "reward/others/turn/2/mean" not in line
    ends = {turns_of(number): number for number in range(1, 5000)}
    assert list(ends.items()) == [
        *((str(number), number) for number in range(1, 9)),
        *((f"{before + 1}-{2 * before}", 2 * before) for before in (8, 16, 32, 64, 128, 256, 512)),
        ("1025-", 4999),
    ]
