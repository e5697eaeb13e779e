"""Stoppers: the same decisions as Ray Tune's over streams of results, and the same decisions after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.tune import stopper as rays

from counterpoint.tune.errors import TuneError
from counterpoint.tune.stoppers import standard
from counterpoint.tune.stoppers.stopper import Stopper

MAKERS: dict[str, Callable[[Any], Any]] = {
    "maximum": lambda module: module.MaximumIterationStopper(5),
    "plateau": lambda module: module.TrialPlateauStopper("loss", std=0.4, num_results=3, grace_period=4),
    "plateau below": lambda module: module.TrialPlateauStopper("loss", std=0.6, metric_threshold=1.5, mode="min"),
    "plateau above": lambda module: module.TrialPlateauStopper("loss", std=0.6, metric_threshold=1.5, mode="max"),
    "experiment": lambda module: module.ExperimentPlateauStopper("loss", std=0.5, top=4, patience=2),
    "experiment max": lambda module: module.ExperimentPlateauStopper("loss", std=0.2, top=3, mode="max"),
    "function": lambda module: module.FunctionStopper(lambda trial_id, result: result["loss"] > 2.8),
    "noop": lambda module: module.NoopStopper(),
}

STREAMS = st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 3)), max_size=40)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.slow
@settings(max_examples=25)
@given(stream=STREAMS, restart=st.integers(0, 40))
def test_the_decisions_are_those_of_ray_also_after_a_restart(
    name: str, stream: list[tuple[str, float]], restart: int
) -> None:
    theirs, ours = MAKERS[name](rays), MAKERS[name](standard)
    for index, (trial_id, loss) in enumerate(stream):
        if index == restart:
            ours = restarted(ours, MAKERS[name](standard))
        result = {"loss": loss}
        assert ours(trial_id, result) == theirs(trial_id, result)
        assert ours.stop_all() == theirs.stop_all()


def restarted(old: Stopper, new: Stopper) -> Stopper:
    new.restore_state(json.loads(json.dumps(old.state())))
    return new


def test_every_combined_stopper_hears_of_every_result() -> None:
    def make() -> Stopper:
        return standard.as_stopper([lambda trial_id, result: True, standard.ExperimentPlateauStopper("loss", top=2)])

    stopper = make()
    assert stopper("a", {"loss": 1.0})
    assert not stopper.stop_all()
    stopper = restarted(stopper, make())
    stopper("b", {"loss": 1.0})
    assert stopper.stop_all()


def test_time_counts_over_restarts_and_not_between_them() -> None:
    now = 100.0

    def make() -> standard.TimeoutStopper:
        return standard.TimeoutStopper(timedelta(seconds=10), clock=lambda: now)

    stopper: Stopper = make()
    now += 50  # setting up
    assert not stopper.stop_all()
    now += 7
    assert not stopper.stop_all()
    old, now = stopper, now + 1000.0
    saved = old.state()
    assert saved == {"spent_s": 1007.0}  # asked now; what was saved before the kill is what counts
    stopper = make()
    stopper.restore_state({"spent_s": 7.0})
    assert not stopper.stop_all()
    now += 2.9
    assert not stopper.stop_all()
    now += 0.2
    assert stopper.stop_all()
    assert not stopper("a", {})


def test_iterations_before_a_restore_count_once() -> None:
    stopper = standard.MaximumIterationStopper(3)
    assert [stopper("a", {"training_iteration": number}) for number in (1, 2, 2, 3)] == [False, False, False, True]


@pytest.mark.parametrize("missing", [{}, {"loss": None}, {"loss": float("nan")}, {"loss": "low"}, {"loss": True}])
def test_a_result_without_the_number_stops_nothing(missing: dict[str, Any]) -> None:
    for stopper in (
        standard.TrialPlateauStopper("loss", std=9, num_results=1, grace_period=1),
        standard.ExperimentPlateauStopper("loss", std=9.0, top=2),
        standard.as_stopper({"loss": 0}),
    ):
        for _ in range(5):
            assert not stopper("a", missing)
            assert not stopper.stop_all()


def test_a_dict_stops_at_or_above_a_value_and_reads_nested_metrics() -> None:
    stopper = standard.as_stopper({"eval/reward": 0.5, "training_iteration": 10})
    assert not stopper("a", {"eval": {"reward": 0.4}, "training_iteration": 9})
    assert stopper("a", {"eval": {"reward": 0.5}, "training_iteration": 1})
    assert stopper("a", {"training_iteration": 10})


def test_a_time_budget_joins_what_else_stops() -> None:
    stopper = standard.as_stopper({"loss": 1}, time_budget_s=1e-9)
    assert stopper("a", {"loss": 1})
    stopper.stop_all()
    assert stopper.stop_all()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: standard.as_stopper(3), "must be a Stopper"),
        (lambda: standard.MaximumIterationStopper(0), "at least 1"),
        (lambda: standard.TrialPlateauStopper("loss", metric_threshold=0.0), "'min' or 'max'"),
        (lambda: standard.ExperimentPlateauStopper("loss", top=1), "above 1"),
        (lambda: standard.ExperimentPlateauStopper("loss", mode="low"), "'min' or 'max'"),
        (lambda: standard.TimeoutStopper(0), "above 0"),
        (lambda: standard.CombinedStopper().restore_state({"stoppers": [{}]}), "resume it with the same"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(TuneError, match=said):
        make()
