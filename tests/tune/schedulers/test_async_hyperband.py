"""ASHA stops nobody who is ahead, and its running quantile is numpy's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.tune.errors import TuneError
from counterpoint.tune.schedulers.async_hyperband import AsyncHyperBandScheduler, RunningQuantile
from counterpoint.tune.trial import Trial
from tests.tune.schedulers.fake_trials import FakeTrials

NUMBERS = st.floats(-1e6, 1e6) | st.integers(-3, 3).map(float)


def asha(**arguments: Any) -> AsyncHyperBandScheduler:
    return AsyncHyperBandScheduler(metric="score", mode="max", **arguments)


@given(st.lists(NUMBERS, min_size=1, max_size=40), st.sampled_from([2, 3, 4, 1.5, 10]))
@settings(max_examples=60)
def test_the_running_quantile_is_that_of_numpy(numbers: list[float], factor: float) -> None:
    quantile = RunningQuantile(1 - 1 / factor)
    assert quantile.value() is None
    for count, number in enumerate(numbers, 1):
        quantile.add(number)
        assert quantile.value() == np.percentile(numbers[:count], (1 - 1 / factor) * 100)


@given(st.lists(NUMBERS, min_size=1, max_size=40), st.sampled_from([2, 3, 4]))
@settings(max_examples=60)
def test_nobody_in_the_top_share_is_stopped(scores: list[float], factor: int) -> None:
    trials = FakeTrials(asha(max_t=100, grace_period=10, reduction_factor=factor))
    for count, score in enumerate(scores, 1):
        decision = trials.report(trials.add(), 10, score)
        rank = sum(other > score for other in scores[: count - 1]) + 1
        if rank <= count / factor or rank == 1:
            assert decision == "CONTINUE"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40), NUMBERS), max_size=60))
@settings(max_examples=40)
def test_nobody_is_stopped_before_the_grace_period_nor_between_rungs(reports: list[tuple[int, int, float]]) -> None:
    trials = FakeTrials(asha(max_t=100, grace_period=4, reduction_factor=3))
    members = [trials.add() for _ in range(6)]
    rung_of = dict.fromkeys(range(6), -1)
    for index, time, score in reports:
        if members[index].status == Trial.TERMINATED:
            continue
        decision = trials.report(members[index], time, score)
        rung = int(math.log(time / 4) / math.log(3) + 1e-9) if time >= 4 else -1
        if rung <= rung_of[index]:
            assert decision == "CONTINUE"
        rung_of[index] = max(rung, rung_of[index])


def test_the_last_rung_stops_a_trial_unless_it_is_told_not_to() -> None:
    for stops in (True, False):
        trials = FakeTrials(asha(max_t=9, stop_last_trials=stops))
        assert trials.report(trials.add(), 9, 1.0) == ("STOP" if stops else "CONTINUE")


def test_a_nan_passes_no_rung_at_which_there_was_a_number() -> None:
    trials = FakeTrials(asha(max_t=9))
    assert trials.report(trials.add(), 1, math.nan) == "CONTINUE"
    assert trials.report(trials.add(), 1, 5.0) == "CONTINUE"
    assert trials.report(trials.add(), 1, math.nan) == "STOP"
    assert trials.report(trials.add(), 1, 5.0) == "CONTINUE"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_t": 0}, "max_t is 0"),
        ({"max_t": 5, "grace_period": 6}, "grace_period is 6; expected at most max_t, 5"),
        ({"grace_period": 0}, "grace_period is 0"),
        ({"reduction_factor": 1}, "reduction_factor is 1"),
        ({"brackets": 0}, "brackets is 0"),
    ],
)
def test_arguments_are_refused_with_the_value_and_what_was_expected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TuneError, match=message):
        asha(**arguments)


def test_metric_and_mode_come_from_the_scheduler_or_from_the_experiment_but_not_from_both() -> None:
    with pytest.raises(TuneError, match="mode is 'best'"):
        AsyncHyperBandScheduler(mode="best")
    scheduler = AsyncHyperBandScheduler()
    with pytest.raises(TuneError, match="needs both"):
        FakeTrials(scheduler).add()
    assert scheduler.set_search_properties(None, "min")
    assert scheduler.metric == "_metric"
    assert not scheduler.set_search_properties(None, "max")
    assert not asha().set_search_properties("loss", None)


def test_results_without_the_time_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = asha(time_attr="epochs")
    for _ in range(2):
        assert scheduler.observed({"score": 1.0, "epoch": 3, "training_iteration": 3}) is None
    assert scheduler.observed({"score": 1.0, "epochs": 3}) == (3, 1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "AsyncHyperBandScheduler: results without 'epochs' (time_attr) are passed over; the nearest is 'epoch'; "
        "it has epoch, score"
    ]
