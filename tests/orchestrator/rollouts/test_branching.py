"""What requests that do not extend each other cost: its metrics beside the samples themselves, and what is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from counterpoint.orchestrator.rollouts.branching import FACTOR, SAMPLES, SaidOfBranches, branch_metrics, in_words
from counterpoint.orchestrator.rollouts.trajectories import assemble_batch, merge_rollout, merge_turns
from counterpoint.orchestrator.step.step_metrics import step_metrics
from counterpoint.transport.records import Rollout, Turn
from tests.support.rollouts import make_rollout, make_turn


def rollout_of(turns: Sequence[Turn], index: int = 0) -> Rollout:
    rollout = make_rollout(0, index, turns=list(turns))
    merge_turns(rollout)
    return rollout


def test_the_factor_is_that_of_the_samples_over_the_longest() -> None:
    first, second = make_turn([1, 2], [3, 4]), make_turn([1, 2, 4, 5], [6, 7])  # 3 was cut out of the history
    stripped, kept = rollout_of([first, second]), rollout_of([first, make_turn([1, 2, 3, 4, 5], [6])], 1)
    line = branch_metrics([stripped])
    assert line == {SAMPLES: 2.0, FACTOR: pytest.approx((4 + 6) / 6)}
    assert branch_metrics([kept]) == {SAMPLES: 1.0, FACTOR: 1.0}
    rollouts = [stripped, kept]
    samples = [sample for rollout in rollouts for sample in merge_rollout(rollout)]
    batch = assemble_batch("one", 1, samples)
    line = step_metrics(
        batch, [*rollouts, make_rollout(0, 2, turns=[first, second], error="KeyError: 'x'", reward=None)]
    )
    assert line[SAMPLES] == line["batch/samples"] / 2
    assert line[FACTOR] == line["batch/tokens"] / (6 + 6)


def test_players_and_untrained_conversations_are_no_repetition() -> None:
    white, black = (replace(make_turn([1, 2], [3]), player=name) for name in ("white", "black"))
    assert branch_metrics([rollout_of([white, black])]) == {SAMPLES: 2.0, FACTOR: 1.0}
    judge = make_turn([9], [8, 7, 6])
    judge.leave_untrained()
    assert branch_metrics([rollout_of([make_turn([1, 2], [3]), judge])]) == {SAMPLES: 1.0, FACTOR: 1.0}
    filtered = rollout_of([make_turn([1, 2], [3])])
    filtered.filtered_by = "zero_advantage"
    assert branch_metrics([filtered]) == {}


def test_it_is_said_once_and_when_it_has_doubled() -> None:
    said = SaidOfBranches()
    news = [said.news({SAMPLES: 20.0, FACTOR: factor}) for factor in (1.9, 2.1, 4.1, 4.2, 5.0, 8.4)]
    assert [bool(words) for words in news] == [False, True, False, True, False, True]
    assert "20.0 samples" in news[1]
    assert "2.1 times" in news[1]
    assert "reasoning_content" in news[1]
    assert not said.news({"step": 3}), "of a run whose branches are not known"


def test_steps_without_the_metrics_do_not_count() -> None:
    assert not in_words([{"step": 1}])
    assert "3.0 times" in in_words([{"step": 1}, {SAMPLES: 4, FACTOR: 2.0}, {SAMPLES: 4, FACTOR: 4.0}])
