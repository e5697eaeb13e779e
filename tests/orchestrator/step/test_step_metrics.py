"""A step's metrics: those that need more than counting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from counterpoint.orchestrator.rollouts.trajectories import assemble_batch, merge_rollout
from counterpoint.orchestrator.step.step_metrics import step_metrics
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
