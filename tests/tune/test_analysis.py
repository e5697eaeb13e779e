"""Analysis: the best of an experiment, from its trials or its directory alone, and tables that pandas makes of it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from counterpoint import tune
from counterpoint.tune.analysis import Analysis
from counterpoint.tune.callbacks.json_logger import JsonLoggerCallback
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.errors import TuneError
from counterpoint.tune.runner.trial_files import read_runner_state, write_state
from counterpoint.tune.trial import Trial

LOSSES = {
    "a": [5.0, 1.0, 4.0],
    "b": [3.0, 3.0, 3.0],
    "c": [2.0, math.nan, 9.0],
    "d": [math.nan, 7.0, math.inf],
    "e": [],
}


def write_experiment(directory: Path, state: bool = True) -> list[Trial]:
    """Trials whose results are written, and after each second result a checkpoint."""
    trials = []
    logger = JsonLoggerCallback()
    for index, (trial_id, losses) in enumerate(LOSSES.items()):
        trial = Trial("module:train", {"x": {"y": index}}, trial_id, str(directory), dirname=f"train_{trial_id}")
        logger.on_trial_start(0, [], trial)
        for number, loss in enumerate(losses, start=1):
            result = {"loss": loss, "eval": {"reward": -loss}, "training_iteration": number, "trial_id": trial_id}
            trial.num_results, trial.last_result = number, {**result, "time_total_s": 0.5 * number}
            logger.on_trial_result(0, [], trial, trial.last_result, number=number)
            if number != 2:
                checkpoint = Checkpoint(trial_id, number, str(Path(trial.logdir, f"checkpoint_{number:06d}")), result)
                Path(checkpoint.path).mkdir()
                trial.checkpoints.append(checkpoint)
                trial.checkpoint = checkpoint
        trial.status = Trial.TERMINATED if losses else Trial.ERROR
        trial.num_failures = 0 if losses else 1
        trials.append(trial)
    if state:
        write_state(directory, trials, {"iteration": 9})
    return trials


@pytest.fixture(params=["live", "directory", "directory without state", "moved"])
def analysis(request: pytest.FixtureRequest, tmp_path: Path) -> Analysis:
    directory = tmp_path / "experiment"
    directory.mkdir()
    trials = write_experiment(directory, state=request.param != "directory without state")
    if request.param == "moved":
        directory = directory.rename(tmp_path / "elsewhere")
    return Analysis(directory, trials if request.param == "live" else None, "loss", "min")


@pytest.mark.parametrize(
    ("scope", "mode", "best"),
    [
        ("last", "min", "b"),
        ("last", "max", "c"),
        ("all", "min", "a"),
        ("all", "max", "c"),
        ("avg", "min", "b"),
        ("avg", "max", "d"),
        ("last-5-avg", "min", "b"),
        ("last-10-avg", "max", "d"),
    ],
)
def test_the_best_trial_depends_on_mode_and_scope(analysis: Analysis, scope: Any, mode: str, best: str) -> None:
    trial = analysis.get_best_trial("loss", mode, scope)
    assert trial is not None
    assert trial.logdir == analysis.get_best_logdir("loss", mode, scope)
    assert Path(trial.logdir).name == f"train_{best}"
    assert analysis.get_best_config("loss", mode, scope) == {"x": {"y": "abcde".index(best)}}


def test_the_best_by_default_and_by_a_nested_metric(analysis: Analysis) -> None:
    assert Path(analysis.best_logdir).name == "train_b"
    assert analysis.best_config == {"x": {"y": 1}}
    assert analysis.best_result["loss"] == 3.0
    trial = analysis.get_best_trial("eval/reward", "max", "all")
    assert trial is not None
    assert Path(trial.logdir).name == "train_a"
    assert analysis.get_best_trial("missing") is None
    assert analysis.get_best_config("missing") is None
    assert list(analysis.best_dataframe["loss"]) == [3.0, 3.0, 3.0]


def test_checkpoints_are_ranked_by_the_result_before_them(analysis: Analysis, request: pytest.FixtureRequest) -> None:
    trial = analysis.get_best_trial(scope="all")
    assert trial is not None
    if "without" in request.node.name:
        assert analysis.get_best_checkpoint(trial) is None
        return
    best, last = analysis.get_best_checkpoint(trial), analysis.get_last_checkpoint(trial)
    assert best is not None
    assert last is not None
    assert (best.iteration, last.iteration) == (3, 3)
    assert analysis.get_last_checkpoint() == analysis.get_last_checkpoint(
        analysis.get_best_trial("training_iteration", "max")
    )
    paths = analysis.get_trial_checkpoints_paths(trial, "loss")
    assert [(path, value) for path, value in paths] == [
        (each.path, value) for each, value in analysis.get_trial_checkpoints(trial, "loss")
    ]
    assert [value for _, value in paths] == [5.0, 4.0]
    worst = analysis.get_best_checkpoint(trial, "loss", "max")
    assert worst is not None
    assert worst.iteration == 1
    shutil.rmtree(best.path)
    assert analysis.get_best_checkpoint(trial) == worst
    assert analysis.best_checkpoint is not None
    assert analysis.best_checkpoint.iteration == 3  # the later of equals


def test_tables(analysis: Analysis) -> None:
    table = analysis.dataframe()
    assert list(table["config/x/y"]) == [0, 1, 2, 3, 4]
    assert list(table["eval/reward"])[:2] == [-4.0, -3.0]
    assert [Path(logdir).name for logdir in table["logdir"]] == [f"train_{name}" for name in "abcde"]
    best = analysis.dataframe("loss", "max")
    assert list(best["loss"])[:4] == [5.0, 3.0, 9.0, 7.0]
    frames = analysis.trial_dataframes
    assert [len(frame) for frame in frames.values()] == [3, 3, 3, 3, 0]
    assert [len(frame) for frame in analysis.fetch_trial_dataframes().values()] == [3, 3, 3, 3, 0]
    assert list(analysis.best_result_df.index) == [analysis.best_trial.trial_id]
    assert list(analysis.results_df.loc["a"][["loss", "config/x/y"]]) == [4.0, 0]
    assert analysis.get_all_configs(prefix=True)[analysis.trials[1].logdir] == {"config/x": {"y": 1}}


def test_stats(analysis: Analysis) -> None:
    stats = analysis.stats()
    assert stats["trials"] == 5
    assert stats["results"] == 12
    assert stats["time_total_s"] == 6.0
    assert len(analysis.results) == 5


def test_a_state_that_is_older_than_the_files_is_completed(tmp_path: Path) -> None:
    trials = write_experiment(tmp_path)
    trials[0].num_results, trials[0].last_result = 1, {"loss": 5.0}
    write_state(tmp_path, trials[:3], {})
    analysis = Analysis(tmp_path)
    assert [trial.trial_id for trial in analysis.trials] == ["a", "b", "c", "d", "train_e"]
    assert analysis.results["a"]["loss"] == 4.0
    assert analysis.stats()["statuses"] == {"PENDING": 2, "TERMINATED": 3}


def test_what_is_missing_or_wrong_is_said(tmp_path: Path) -> None:
    analysis = Analysis(tmp_path, write_experiment(tmp_path, state=False))
    with pytest.raises(TuneError, match="no metric"):
        analysis.get_best_trial()
    with pytest.raises(TuneError, match="mode is None"):
        analysis.get_best_trial("loss")
    with pytest.raises(TuneError, match="scope is 'first'"):
        analysis.get_best_trial("loss", "min", "first")  # type: ignore[arg-type]
    with pytest.raises(TuneError, match="has a finite number for 'missing'"):
        _ = Analysis(tmp_path, analysis.trials, "missing", "min").best_config
    with pytest.raises(TuneError, match="is no directory"):
        Analysis(tmp_path / "nowhere")
    (tmp_path / "experiment_state.json").write_text("[]")
    with pytest.raises(ValueError, match="experiment_state"):
        Analysis(tmp_path)


def quadratic(config: dict[str, Any]) -> None:
    """A trainable: three results."""
    for step in range(3):
        tune.report(loss=(config["x"] - 0.5) ** 2 + 1 / (step + 1), x={"y": config["x"]})


@pytest.mark.slow
def test_an_experiment_is_run_logged_searched_stopped_and_analysed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All parts together, with processes of their own."""
    analysis = tune.run(
        quadratic,
        name="quadratic",
        config={"x": tune.uniform(0, 1), "twice": tune.sample_from(lambda spec: spec.config.x * 2)},
        num_samples=4,
        metric="loss",
        mode="min",
        stop=tune.MaximumIterationStopper(2),
        search_alg=tune.ConcurrencyLimiter(tune.OptunaSearch(sampler="random", seed=3), 2),
        local_dir=str(tmp_path),
    )
    said = capsys.readouterr().err
    assert f"results in {tmp_path / 'quadratic'}" in said
    assert f"4 trials: 4 TERMINATED; best loss = {analysis.best_result['loss']:.6g}, {analysis.best_trial}" in said
    compared = read_runner_state(tmp_path / "quadratic")
    assert (compared["metric"], compared["mode"]) == ("loss", "min")
    again = Analysis(tmp_path / "quadratic", default_metric="loss", default_mode="min")
    for each in (analysis, again):
        assert each.stats()["statuses"] == {"TERMINATED": 4}
        assert each.stats()["results"] == 8
        assert each.best_config["twice"] == each.best_config["x"] * 2
        assert list(each.best_dataframe["training_iteration"]) == [1, 2]
    assert again.best_config == analysis.best_config
    params = [json.loads(path.read_text()) for path in (tmp_path / "quadratic").glob("*/params.json")]
    assert len(params) == 4
    assert analysis.best_config in params
    searched = tune.OptunaSearch({"x": tune.uniform(0, 1)}, "loss", "min", sampler="random", seed=3)
    assert sorted(config["x"] for config in params) == sorted(searched.suggest(str(n))["x"] for n in range(4))
