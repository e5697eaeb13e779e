"""The median rule: who is compared with whom, and from when on."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.tune.schedulers.median_stopping import MedianStoppingRule
from counterpoint.tune.trial import Trial
from tests.tune.schedulers.fake_trials import FakeTrials


def rule(**arguments: Any) -> MedianStoppingRule:
    defaults: dict[str, Any] = {"time_attr": "training_iteration", "metric": "score", "mode": "max", "grace_period": 1}
    return MedianStoppingRule(**defaults | arguments)


def with_others(scheduler: MedianStoppingRule, *scores: float) -> FakeTrials:
    """Trials that have reported their score at the times 1 to 5."""
    trials = FakeTrials(scheduler)
    for score in scores:
        trial = trials.add()
        for time in range(1, 6):
            trials.report(trial, time, score)
    return trials


def test_a_trial_stops_whose_best_is_below_the_median_of_the_means() -> None:
    trials = with_others(rule(min_samples_required=3), 1, 2, 3)
    assert trials.report(trials.add(), 2, 1.9) == "STOP"
    assert trials.report(trials.add(), 2, 2.0) == "CONTINUE"


def test_nothing_stops_with_too_few_others_or_before_the_grace_period() -> None:
    trials = with_others(rule(min_samples_required=4), 1, 2, 3)
    assert trials.report(trials.add(), 2, 0) == "CONTINUE"
    trials = with_others(rule(grace_period=3), 1, 2, 3)
    trial = trials.add()
    assert [trials.report(trial, time, 0) for time in (1, 2, 3)] == ["CONTINUE", "CONTINUE", "STOP"]


def test_while_there_are_too_few_others_a_trial_yields_once_in_a_time_slice() -> None:
    trials = FakeTrials(rule(min_time_slice=2))
    trial = trials.add()
    trials.add(status=Trial.PENDING)
    assert [trials.report(trial, time, 0) for time in (1, 2, 3, 4)] == ["PAUSE", "CONTINUE", "CONTINUE", "PAUSE"]


def test_a_soft_stop_is_a_pause_after_which_the_trial_is_left_alone() -> None:
    trials = with_others(rule(hard_stop=False), 1, 2, 3)
    trial = trials.add()
    assert [trials.report(trial, time, 0) for time in (2, 3)] == ["PAUSE", "CONTINUE"]


def test_results_that_are_reported_again_count_once() -> None:
    once, again = (with_others(rule(), 1, 2, 4) for _ in range(2))
    for time in (3, 4, 5):
        again.report(again.trials[1], time, 2)
    assert once.scheduler.state() == again.scheduler.state()


@given(st.lists(st.lists(st.integers(-4, 4) | st.just(math.nan), min_size=1, max_size=6), min_size=2, max_size=8))
@settings(max_examples=40)
def test_nobody_who_has_done_better_than_all_others_is_stopped(columns: list[list[float]]) -> None:
    trials = FakeTrials(rule(min_samples_required=1))
    before = -math.inf
    for scores in columns:
        trial = trials.add()
        best = -math.inf
        for time, score in enumerate(scores, 1):
            best = best if math.isnan(score) else max(best, score)
            if trials.report(trial, time, score) == "STOP":
                assert best < before
                break
        before = max(before, best)
