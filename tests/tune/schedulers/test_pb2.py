"""Population based bandits: what is observed, where the model looks next, and that a restart changes nothing."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from tests.tune.schedulers.fake_trials import FakeTrials
from tune.errors import TuneError
from tune.schedulers.gain_model import GainModel
from tune.schedulers.pb2 import PB2

BEST = 0.7


def pb2(**arguments: Any) -> PB2:
    defaults: dict[str, Any] = {
        "time_attr": "training_iteration",
        "metric": "score",
        "mode": "max",
        "perturbation_interval": 1,
        "hyperparam_bounds": {"lr": [0.0, 10.0], "layers": [1, 9]},
    }
    return PB2(**defaults | arguments)


def gain(config: dict[str, Any]) -> float:
    return 1 - (config["lr"] / 10 - BEST) ** 2 * 8


def play(trials: FakeTrials, rounds: range, scores: dict[str, float]) -> None:
    """Each trial gains what its configuration is worth, in turn; who takes over goes on from the source's score."""
    for number in rounds:
        for trial in trials.trials:
            before = len(trials.exploited)
            scores[trial.trial_id] += gain(trial.config)
            trials.report(trial, number, scores[trial.trial_id])
            for who, path, _ in trials.exploited[before:]:
                scores[who] = scores[path.split("/")[1]]


def begun(scheduler: PB2) -> tuple[FakeTrials, dict[str, float]]:
    trials = FakeTrials(scheduler)
    for lr in (0.5, 2.0, 4.0, 9.5):
        trials.add({"lr": lr, "layers": 4})
    return trials, {trial.trial_id: 0.0 for trial in trials.trials}


@pytest.mark.slow
def test_it_finds_what_gains_most_within_the_bounds() -> None:
    early, late = [], []
    for seed in range(5):
        scheduler = pb2(seed=seed, hyperparam_bounds={"lr": [0.0, 10.0]})
        trials, scores = begun(scheduler)
        play(trials, range(1, 25), scores)
        away = [abs(config["lr"] / 10 - BEST) for _, _, config in trials.exploited]
        assert all(0 <= config["lr"] <= 10 for _, _, config in trials.exploited)
        early += away[:2]
        late += away[-3:]
    assert np.mean(late) < 0.1 < np.mean(early), "a draw at random is 0.29 away on average"


@pytest.mark.slow
def test_a_restart_changes_no_decision() -> None:
    first = pb2(seed=3)
    trials, scores = begun(first)
    play(trials, range(1, 8), scores)
    saved, kept = json.loads(json.dumps(first.state())), dict(scores)
    configs = {trial.trial_id: dict(trial.config) for trial in trials.trials}
    play(trials, range(8, 20), scores)
    second = pb2(seed=3)
    again, _ = begun(second)
    second.restore_state(saved)
    for trial in again.trials:
        trial.config = configs[trial.trial_id]
    play(again, range(8, 20), kept)
    count = len(again.exploited)
    assert count > 0
    assert all(isinstance(config["layers"], int) and 1 <= config["layers"] <= 9 for _, _, config in again.exploited)
    assert [each[2] for each in again.exploited] == [each[2] for each in trials.exploited[-count:]]
    assert scores == kept


def test_what_the_configuration_lacks_is_drawn_within_the_bounds() -> None:
    trials = FakeTrials(pb2())
    config = trials.add({}).config
    assert 0 <= config["lr"] <= 10
    assert 1 <= config["layers"] <= 9


def test_whole_numbers_stay_within_bounds_that_are_not() -> None:
    scheduler = pb2(hyperparam_bounds={"layers": [0.4, 2.6]}, quantile_fraction=0.5)
    trials = FakeTrials(scheduler)
    for _ in range(4):
        trials.add({"layers": 1})
    for number in range(1, 12):
        for score, trial in enumerate(trials.trials):
            trials.report(trial, number, score)
    drawn = {config["layers"] for _, _, config in trials.exploited}
    assert drawn == {1, 2}, "some that is drawn is nearer to 0 or to 3"
    with pytest.raises(TuneError, match=r"hyperparam_bounds, 0.2 to 0.8; .*1.0"):
        FakeTrials(pb2(hyperparam_bounds={"layers": [0.2, 0.8]})).add({"layers": 1})


def test_the_model_looks_where_it_knows_little_and_not_where_others_look() -> None:
    model, generator = GainModel(1), random.Random(1)
    for place, gained in ((0.1, 0.0), (0.2, 0.2), (0.3, 0.4)):
        model.observe(1.0, [place], gained)
    model.observe(1.0, [0.5], float("nan"))
    assert len(model.state()) == 3
    found = model.best(2.0, [], generator)
    assert found[0] > 0.3
    others = [model.best(2.0, [found] * 3, random.Random(seed)) for seed in range(3)]
    assert all(abs(each[0] - found[0]) > 0.02 for each in others)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hyperparam_bounds": None}, "expected hyperparam_bounds"),
        ({"hyperparam_bounds": {"lr": [3, 1]}}, "hyperparam_bounds/lr is"),
        ({"hyperparam_bounds": {"lr": [1]}}, "hyperparam_bounds/lr is"),
        ({"hyperparam_bounds": {"lr": [0, float("inf")]}}, "hyperparam_bounds/lr is"),
        ({"hyperparam_bounds": {"lr": [float("-inf"), 0]}}, "hyperparam_bounds/lr is"),
        ({"hyperparam_bounds": {"lr": [float("nan"), 0]}}, "hyperparam_bounds/lr is"),
        ({"hyperparam_bounds": {"lr": [-1e308, 1e308]}}, "hyperparam_bounds/lr is"),
        ({"quantile_fraction": 2}, "quantile_fraction is 2"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TuneError, match=words):
        pb2(**arguments)
