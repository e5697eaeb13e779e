"""Rollouts that do not fit the others of their batch fail there, with the reason; the step goes on with the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from counterpoint.orchestrator.step.advantages import load_advantage
from counterpoint.orchestrator.step.batch_form import choose_trained, fail_other_forms
from counterpoint.orchestrator.step.boundary import StepBoundary
from counterpoint.run.config import AdvantageConfig
from counterpoint.transport.records import TEACHER_LOG_PROBABILITIES, Rollout
from tests.support.rollouts import make_rollout, make_turn


def with_routing(index: int) -> Rollout:
    return make_rollout(0, index)


def without_routing(index: int) -> Rollout:
    return make_rollout(1, index, turns=[make_turn([1, 2, 3], [4, 5])])


def with_column(index: int) -> Rollout:
    turn = make_turn([1, 2, 3], [4, 5], start=0)
    return make_rollout(2, index, turns=[replace(turn, columns={TEACHER_LOG_PROBABILITIES: np.zeros(2, np.float32)})])


def test_rollouts_of_one_form_stay() -> None:
    for make in (with_routing, without_routing, with_column):
        rollouts = [make(0), make(1)]
        fail_other_forms(1, rollouts)
        assert [rollout.error for rollout in rollouts] == [None, None]


def test_those_of_another_form_than_most_fail_with_both_forms(caplog: pytest.LogCaptureFixture) -> None:
    rollouts = [without_routing(0), with_routing(0), with_column(0), with_routing(1)]
    fail_other_forms(3, rollouts)
    usual = "most rollouts of its batch have routed experts [2, 2] of uint8 and no column"
    assert [rollout.error for rollout in rollouts] == [
        f"it came from http://127.0.0.1:1 with no routed experts and no column; {usual}",
        None,
        f"it came from http://127.0.0.1:1 with routed experts [2, 2] of uint8 and {TEACHER_LOG_PROBABILITIES}; {usual}",
        None,
    ]
    assert "step 3: 2 of 4 rollouts are not trained on, such as 1-0" in caplog.text


def test_rollouts_that_are_not_trained_on_do_not_count() -> None:
    failed, filtered = without_routing(0), without_routing(1)
    failed.error, filtered.filtered_by = "it broke", "zero_advantage"
    failed.turns = []
    rollouts = [failed, filtered, with_routing(0)]
    fail_other_forms(1, rollouts)
    assert [rollout.error for rollout in rollouts] == ["it broke", None, None]


async def test_a_batch_of_several_forms_is_merged_without_the_others(tmp_path: Path) -> None:
    boundary = StepBoundary(tmp_path, "run", {})
    rollouts = [without_routing(0), with_routing(0), with_routing(1), with_column(0)]
    choose_trained(1, rollouts, load_advantage(AdvantageConfig()))
    batch, _ = await boundary.merge(1, rollouts)
    assert [sample.rollout_id for sample in batch.samples] == ["0-0", "0-1"]
    assert len(batch.routed_experts) == 2
    assert batch.optional == []


@pytest.mark.parametrize("kind", ["batch_standardised", "group_mean_batch_scaled"])
def test_advantages_of_a_step_are_relative_to_those_of_the_usual_form(kind: str) -> None:
    rollouts = [with_routing(0), with_routing(1), without_routing(0)]
    for rollout, advantage in zip(rollouts, (1.0, -1.0, 7.0), strict=True):
        rollout.advantage, rollout.advantage_kind = advantage, kind
    choose_trained(1, rollouts, load_advantage(AdvantageConfig(kind=kind)))
    assert [rollout.advantage for rollout in rollouts[:2]] == [1.0, -1.0]
