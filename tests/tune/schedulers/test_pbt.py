"""Population based training: who takes over whom, from which checkpoint, with which configuration, and what is logged."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint import tune
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.errors import TuneError
from counterpoint.tune.json_values import as_json
from counterpoint.tune.schedulers.explore import explore
from counterpoint.tune.schedulers.pbt import PopulationBasedTraining
from counterpoint.tune.schedulers.pbt_replay import PopulationBasedTrainingReplay
from counterpoint.tune.search.spaces import Categorical
from tests.tune.schedulers.fake_trials import FakeTrials


def pbt(**arguments: Any) -> PopulationBasedTraining:
    defaults: dict[str, Any] = {
        "time_attr": "training_iteration",
        "metric": "score",
        "mode": "max",
        "perturbation_interval": 2,
        "hyperparam_mutations": {"lr": [1, 2, 4, 8]},
    }
    return PopulationBasedTraining(**defaults | arguments)


def population(scheduler: PopulationBasedTraining, size: int = 4) -> FakeTrials:
    trials = FakeTrials(scheduler)
    for _ in range(size):
        trials.add({"lr": 2})
    return trials


def clipped(config: dict[str, Any]) -> dict[str, Any]:
    """A `custom_explore_fn`, named by its import path below."""
    return {**config, "lr": 1}


def test_the_worst_takes_over_the_checkpoint_and_the_explored_configuration_of_the_best() -> None:
    trials = population(pbt(resample_probability=0))
    for trial, score in zip(trials.trials, (0, 1, 2, 3), strict=True):
        trials.report(trial, 2, score)
    assert trials.exploited == []  # Nobody was saved yet who is ahead now.
    decisions = [trials.report(trials.trials[index], 4, index) for index in (3, 2, 1, 0)]
    assert decisions == ["CONTINUE", "CONTINUE", "CONTINUE", "NOOP"]
    ((who, path, config),) = trials.exploited
    assert (who, path) == ("t0", "/t3/4")
    assert config["lr"] in (1, 4)
    assert trials.trials[0].experiment_tag == f"0_tag@perturbed[lr={config['lr']}]"


def test_nothing_happens_within_an_interval_or_while_the_population_burns_in() -> None:
    trials = population(pbt(perturbation_interval=3, burn_in_period=6))
    for time in (1, 2, 3, 4, 5):
        assert {trials.report(trial, time, 1.0) for trial in trials.trials} == {"CONTINUE"}
    assert trials.exploited == []


def test_a_checkpoint_that_could_not_be_saved_is_taken_over_by_nobody() -> None:
    scheduler = pbt()
    trials = population(scheduler, 2)
    assert trials.report(trials.trials[1], 2, 1.0) == "CONTINUE"
    trials.report(trials.trials[0], 2, 2.0)
    saved = Checkpoint("t0", 2, "/t0/2")
    assert scheduler.needs_checkpoint(saved)
    assert not scheduler.needs_checkpoint(Checkpoint("t0", 1, "/t0/1"))
    scheduler.on_save_failed(trials, saved)
    assert not scheduler.needs_checkpoint(saved)
    assert trials.report(trials.trials[1], 4, 1.0) == "CONTINUE"
    assert trials.exploited == []


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3) | st.just(math.nan), st.booleans()), max_size=80),
    st.booleans(),
)
@settings(max_examples=50)
def test_only_checkpoints_that_are_saved_are_taken_over_and_never_ones_own(
    reports: list[tuple[int, float, bool]], synch: bool
) -> None:
    """Whichever saves fail."""
    scheduler = pbt(synch=synch)
    trials = population(scheduler, 5)
    failed: set[str] = set()
    times = dict.fromkeys(range(5), 0)
    for index, score, fails in reports:
        trial = trials.trials[index]
        if trial.status != "RUNNING":
            continue
        times[index] += 1
        before = len(trials.exploited)
        trials.report(trial, times[index], score)
        for who, path, _ in trials.exploited[before:]:
            assert path not in failed
            assert not path.startswith(f"/{who}/")
        checkpoint = trials.save_trial(trial, trial.last_result)
        if fails and scheduler.needs_checkpoint(checkpoint):
            scheduler.on_save_failed(trials, checkpoint)
            failed.add(checkpoint.path)
        while (chosen := scheduler.choose_trial_to_run(trials)) is not None:
            chosen.status = "RUNNING"


def test_in_synchronous_mode_all_wait_and_then_the_quantiles_are_exchanged() -> None:
    trials = population(pbt(synch=True))
    for index in range(4):
        assert trials.scheduler.choose_trial_to_run(trials) is None
        assert trials.report(trials.trials[index], 2, index) == "PAUSE"
    assert [(who, path) for who, path, _ in trials.exploited] == [("t0", "/t3/2")]
    assert trials.scheduler.choose_trial_to_run(trials) is trials.trials[0]


def test_in_synchronous_mode_a_round_ends_though_each_result_is_longer_than_an_interval() -> None:
    trials = population(pbt(synch=True))
    for time in (10, 20):
        for index in range(4):
            assert trials.report(trials.trials[index], time, index) == "PAUSE"
        assert trials.scheduler.choose_trial_to_run(trials) is trials.trials[0]
        for trial in trials.trials:
            trial.status = "RUNNING"


def test_in_synchronous_mode_a_trial_that_fails_is_not_waited_for() -> None:
    trials = population(pbt(synch=True))
    for index in range(3):
        trials.report(trials.trials[index], 2, index)
    trials.fail(trials.trials[3])
    assert [(who, path) for who, path, _ in trials.exploited] == [("t0", "/t2/2")]
    assert trials.scheduler.choose_trial_to_run(trials) is not None


def test_a_missing_metric_is_an_error_unless_it_is_allowed() -> None:
    trials = population(pbt())
    with pytest.raises(TuneError, match="lacks a number 'training_iteration' or 'score'"):
        trials.scheduler.on_trial_result(trials, trials.trials[0], {"training_iteration": 1})
    trials = population(pbt(require_attrs=False))
    assert trials.scheduler.on_trial_result(trials, trials.trials[0], {"training_iteration": 9}) == "CONTINUE"


def test_keys_that_a_configuration_lacks_are_drawn_and_the_draws_have_a_seed() -> None:
    space = {"lr": tune.loguniform(1e-4, 1e-1), "nested": {"width": tune.randint(1, 9), "kind": ("a", "b")}}
    configs = [FakeTrials(pbt(hyperparam_mutations=space, seed=seed)).add().config for seed in (1, 1, 2)]
    assert configs[0] == configs[1] != configs[2]
    assert 1e-4 <= configs[0]["lr"] <= 1e-1
    assert configs[0]["nested"]["kind"] in ("a", "b")


def test_whole_numbers_and_booleans_stay_what_they_are() -> None:
    config = {"layers": 3, "flag": True, "lr": 0.5, "other": [1]}
    space: dict[str, Any] = {"layers": tune.randint(1, 9), "flag": tune.choice([True, False]), "lr": tune.uniform(0, 1)}
    for seed in range(20):
        changed = explore(config, space, 0.5, (1.2, 0.8), random.Random(seed))
        assert [type(value) for value in changed.values()] == [int, bool, float, list]
    assert config == {"layers": 3, "flag": True, "lr": 0.5, "other": [1]}


@pytest.mark.parametrize(
    ("value", "space"),
    [
        (0.97, tune.uniform(0.9, 1.0)),
        (5e-6, tune.loguniform(1e-6, 1e-5)),
        (-0.3, tune.uniform(-0.5, 0)),
        (0.5, tune.quniform(0.25, 1, 0.25)),
        (7.0, tune.qrandn(5, 2, 0.5)),
        (1, tune.randint(1, 4)),
        (10, tune.qrandint(10, 40, 10)),
        (8, tune.choice([2, 4, 8])),
        ("constant", tune.choice(["constant", "cosine", None])),
        ([0.9, 0.95], tune.choice([(0.9, 0.95), (0.9, 0.99)])),
        ({"name": "adam"}, tune.choice([{"name": "adam"}, {"name": "sgd", "momentum": tune.uniform(0.5, 0.9)}])),
        (True, [True, 1, 0]),
        (3, tune.uniform(1, 5)),
    ],
)
def test_a_value_stays_in_its_domain_and_moves(value: Any, space: Any) -> None:
    """Ray multiplies, whatever the domain: beyond its bounds, between the values of a choice, and not at all by texts."""
    domain: Any = tune.choice(space) if isinstance(space, list) else space
    seen: list[Any] = []
    config = {"nested": {"key": value}}
    for seed in range(60):
        config = as_json(explore(config, {"nested": {"key": space}}, 0.1, (1.2, 0.8), random.Random(seed)))
        now = config["nested"]["key"]
        assert domain.is_valid(now), now
        assert getattr(domain, "q", None) is None or now % domain.q == 0
        assert type(now) is type(value) or isinstance(domain, Categorical)
        if now not in seen:
            seen.append(now)
    assert len(seen) > 1


def test_a_value_never_reaches_a_bound_that_is_not_drawn() -> None:
    """A key may refuse it, as a decay of 1."""
    for value, space in ((0.99, tune.uniform(0.9, 1.0)), (3, tune.randint(0, 4))):
        assert explore({"x": value}, {"x": space}, 0, (1.2,), random.Random(0))["x"] < space.upper


def test_whole_numbers_move_by_at_least_one_and_those_of_a_function_not_to_zero() -> None:
    def after(value: int, space: Any, factor: float) -> Any:
        return explore({"x": value}, {"x": space}, 0, (factor,), random.Random(0))["x"]

    assert [after(value, lambda: 1, 1.2) for value in (0, 1, 2, 3, -1)] == [0, 2, 3, 4, -2]
    assert [after(value, lambda: 1, 0.8) for value in (0, 1, 2, 3, -1)] == [0, 1, 1, 2, -1]
    assert [after(value, tune.randint(0, 9), 0.8) for value in (0, 1, 2)] == [0, 0, 1]
    assert [after(value, tune.randint(0, 9), 1.2) for value in (0, 1, 8)] == [1, 2, 8]
    assert after(2, tune.randint(0, 9), 1.0) == 2


def test_what_a_function_returns_is_drawn_anew_if_it_is_no_number() -> None:
    drawn = iter(["b", "c"])
    assert explore({"x": "a"}, {"x": lambda: next(drawn)}, 0, (1.2,), random.Random(0)) == {"x": "b"}
    assert explore({"x": 1}, {"x": lambda: next(drawn)}, 1, (1.2,), random.Random(0)) == {"x": "c"}


def test_a_table_of_mutations_is_completed_and_never_meets_a_value() -> None:
    scheduler = pbt(hyperparam_mutations={"net": {"width": [3], "kind": tune.choice([{"x": tune.uniform(0, 1)}])}})
    config = FakeTrials(scheduler).add({"net": {"depth": 2}}).config
    assert (config["net"]["depth"], config["net"]["width"]) == (2, 3)
    assert 0 <= config["net"]["kind"]["x"] <= 1
    with pytest.raises(TuneError, match="config/net is 3"):
        FakeTrials(scheduler).add({"net": 3})


def test_a_custom_function_is_named_by_its_import_path_and_explores_last() -> None:
    trials = population(pbt(custom_explore_fn=f"{__name__}:clipped"), 2)
    trials.report(trials.trials[1], 2, 1.0)
    trials.report(trials.trials[0], 2, 0.0)
    assert trials.trials[0].config == {"lr": 2}, "nothing was saved at its first perturbation"
    trials.report(trials.trials[1], 4, 1.0)
    trials.report(trials.trials[0], 4, 0.0)
    assert trials.trials[0].config == {"lr": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hyperparam_mutations": {}}, "expected hyperparam_mutations or custom_explore_fn"),
        ({"hyperparam_mutations": {"a": {"b": 3}}}, "hyperparam_mutations/a/b: 3 is a int"),
        ({"hyperparam_mutations": {"a": []}}, "hyperparam_mutations/a: an empty list"),
        ({"hyperparam_mutations": {"a": tune.sample_from(lambda: 1)}}, "sample_from is not supported"),
        ({"hyperparam_mutations": {"a": tune.grid_search([1, 2])}}, "hyperparam_mutations/a: a grid"),
        ({"perturbation_factors": ()}, "perturbation_factors"),
        ({"perturbation_factors": (1.2, 0)}, "perturbation_factors"),
        ({"quantile_fraction": 0.6}, "quantile_fraction is 0.6; expected 0 to 0.5"),
        ({"perturbation_interval": 0}, "perturbation_interval is 0"),
    ],
)
def test_arguments_are_refused_with_the_value_and_what_was_expected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TuneError, match=message):
        pbt(**arguments)


def test_the_policy_is_written_once_a_step_and_again_after_a_restore(tmp_path: Path) -> None:
    scheduler = pbt()
    trials = population(scheduler, 2)
    for index, time in ((0, 2), (1, 2), (1, 4), (0, 4)):
        trials.trials[index].local_dir = str(tmp_path)
        trials.report(trials.trials[index], time, index)
    (log,) = scheduler.callbacks()
    log.on_step_end(1, trials.trials)
    path = tmp_path / "pbt_policy_t0.txt"
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert row == ["0_tag", "1_tag", 4, 4, {"lr": 2}, trials.trials[0].config]
    path.unlink()
    log.on_step_end(2, trials.trials)
    assert not path.exists()
    scheduler.restore_state(json.loads(json.dumps(scheduler.state())))
    log.on_step_end(3, trials.trials)
    assert path.read_text() == (tmp_path / "pbt_global.txt").read_text()
    assert pbt(log_config=False).callbacks() == ()


def policy_file(directory: Path) -> Path:
    rows = [
        ["b", "x", 1, 1, {"lr": 9}, {"lr": 8}],  # overwritten: the next row's source is not b
        ["c", "d", 2, 2, {"lr": 1}, {"lr": 2}],
        ["a", "c", 5, 4, {"lr": 2}, {"lr": 3}],
    ]
    path = directory / "pbt_policy_a.txt"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_replay_changes_the_configuration_of_one_trial_when_the_policy_did(tmp_path: Path) -> None:
    scheduler = PopulationBasedTrainingReplay(str(policy_file(tmp_path)))
    trials = FakeTrials(scheduler)
    trial = trials.add()
    assert trial.config == {"lr": 1}
    assert [trials.report(trial, time, 0) for time in range(1, 6)] == [
        "CONTINUE",
        "NOOP",
        "CONTINUE",
        "NOOP",
        "CONTINUE",
    ]
    assert trials.exploited == [("t0", "/t0/2", {"lr": 2}), ("t0", "/t0/4", {"lr": 3})]
    with pytest.raises(TuneError, match="pass num_samples=1"):
        trials.add()


def test_a_policy_file_that_is_missing_or_damaged_is_refused_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="does not exist"):
        PopulationBasedTrainingReplay(str(tmp_path / "none.txt"))
    path = policy_file(tmp_path)
    path.write_text(f"{path.read_text()}[1, 2]\n")
    with pytest.raises(TuneError, match="line 4"):
        PopulationBasedTrainingReplay(str(path))
