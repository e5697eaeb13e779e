"""The parts of an experiment that its file describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from counterpoint.transport.errors import UserError
from counterpoint.tune.config import TuneConfig
from counterpoint.tune.from_file import leaves, scheduler_of, search_of, space_of, stopper_of
from counterpoint.tune.schedulers.pbt import PopulationBasedTraining
from counterpoint.tune.search import spaces

FILE = Path("tune.toml")


def config(**values: Any) -> TuneConfig:
    return TuneConfig.model_validate({"name": "x", "trainable": "some:thing", "metric": "score", **values})


def test_a_space_is_read_with_its_domains() -> None:
    table = {
        "lr": {"loguniform": [1e-4, 1e-2]},
        "depth": {"grid_search": [1, 2]},
        "kind": {"choice": ["a", "b"]},
        "fixed": 3,
        "inner": {"width": {"randint": [1, 9]}, "uniform": 5, "other": 6},
    }
    space = space_of(table, "here")
    assert space["lr"] == spaces.loguniform(1e-4, 1e-2)
    assert space["depth"] == {"grid_search": [1, 2]}
    assert space["kind"] == spaces.choice(["a", "b"])
    assert space["fixed"] == 3
    assert space["inner"] == {"width": spaces.randint(1, 9), "uniform": 5, "other": 6}
    assert [path for path, _ in leaves(table)] == [
        "lr",
        "depth",
        "kind",
        "fixed",
        "inner.width",
        "inner.uniform",
        "inner.other",
    ]


def test_a_domain_that_is_misspelt_is_told_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"here: net.lr.logunifrm = .*the nearest is loguniform"):
        space_of({"net": {"lr": {"logunifrm": [1e-4, 1e-2]}}}, "here")
    assert space_of({"net": {"lr": {"unit": [1, 2]}}}, "here") == {"net": {"lr": {"unit": [1, 2]}}}


def test_a_value_may_come_of_a_function() -> None:
    space = space_of({"seed": {"sample_from": "os:getcwd"}}, "here")
    assert isinstance(space["seed"], spaces.Function)
    with pytest.raises(UserError, match=r"here: seed\.sample_from = 'os:nothing'"):
        space_of({"seed": {"sample_from": "os:nothing"}}, "here")
    with pytest.raises(UserError, match="no signature"):
        # Which of the built-in functions have no signature depends on the version of Python.
        space_of({"seed": {"sample_from": "builtins:iter"}}, "here")


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "fifo"},
        {"kind": "asha", "max_t": 20, "grace_period": 2},
        {"kind": "hyperband", "max_t": 9},
        {"kind": "median", "grace_period": 3},
        {"kind": "pbt", "perturbation_interval": 2},
    ],
)
def test_each_scheduler_can_be_named(given: dict[str, Any]) -> None:
    scheduler = scheduler_of(config(scheduler=given, space={"lr": {"uniform": [0.0, 1.0]}}), FILE)
    assert scheduler.set_search_properties("score", "max")


def test_pbt_changes_what_the_space_draws_unless_it_is_told() -> None:
    space = {
        "lr": {"uniform": [0.0, 1.0]},
        "depth": {"grid_search": [1]},
        "fixed": 2,
        "inner": {"x": {"randint": [1, 3]}},
    }
    scheduler = scheduler_of(config(scheduler={"kind": "pbt"}, space=space), FILE)
    assert isinstance(scheduler, PopulationBasedTraining)
    assert scheduler._mutations == {"lr": spaces.uniform(0.0, 1.0), "inner": {"x": spaces.randint(1, 3)}}
    told = scheduler_of(config(scheduler={"kind": "pbt", "mutations": {"lr": [0.1, 0.2]}}, space=space), FILE)
    assert isinstance(told, PopulationBasedTraining)
    assert told._mutations == {"lr": [0.1, 0.2]}
    with pytest.raises(UserError, match=r"tune\.toml: scheduler\.kind = 'pbt'"):
        scheduler_of(config(scheduler={"kind": "pbt"}, space={"fixed": 1}), FILE)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"kind": "optuna", "sampler": "random"}, {"kind": "optuna", "repeat": 2}])
def test_each_search_can_be_named(given: dict[str, Any]) -> None:
    assert search_of(config(search=given, max_concurrent=2), FILE) is not None


def test_a_trainable_names_its_own_metric_and_is_not_tried_again() -> None:
    with pytest.raises(ValidationError, match="executor = 'local' needs metric"):
        TuneConfig.model_validate({"name": "x", "trainable": "some:thing"})
    runs = TuneConfig.model_validate({"name": "x", "executor": "runs", "job": {"join": "somewhere"}})
    assert (runs.metric, runs.failures_allowed) == ("reward/mean", 2)
    assert (config().failures_allowed, config(max_failures=1).failures_allowed) == (0, 1)


def test_stoppers_are_combined() -> None:
    assert stopper_of(config()) is None
    one = stopper_of(config(stop={"training_iteration": 3}))
    assert one is not None
    assert one("a", {"training_iteration": 3})
    both = stopper_of(config(stop={"training_iteration": 3, "plateau": {"top": 2}, "timeout_seconds": 1000.0}))
    assert both is not None
    assert not both("a", {"training_iteration": 2, "reward/mean": 1.0})
    assert not both.stop_all()
