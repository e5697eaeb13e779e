"""`run` and `run_experiments` with processes of this machine, and the arguments that they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from counterpoint import tune
from counterpoint.tune.trial import Trial
from tests.tune.executors.trainables import Counter

COUNTER = "tests.tune.executors.trainables:Counter"


@pytest.mark.slow
def test_a_grid_runs_to_its_end_and_is_found_again(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "name": "grid",
        "config": {"begin": tune.grid_search([0, 10])},
        "metric": "count",
        "mode": "max",
        "stop": {"training_iteration": 3},
        "checkpoint_at_end": True,
        "local_dir": str(tmp_path),
        "verbose": 0,
        "resume": "AUTO",
    }
    analysis = tune.run(Counter, **arguments)
    assert analysis.best_result["count"] == 13
    assert sorted(trial.last_result["count"] for trial in analysis.trials) == [3, 13]
    assert all(trial.checkpoint is not None and Path(trial.checkpoint.path).is_dir() for trial in analysis.trials)
    again = tune.run(Counter, **arguments)
    assert [trial.trial_id for trial in again.trials] == [trial.trial_id for trial in analysis.trials]
    with pytest.raises(tune.TuneError, match="holds an experiment already"):
        tune.run(Counter, **{**arguments, "resume": False})


@pytest.mark.slow
def test_several_experiments_run_as_one_and_errors_are_raised_at_the_end(tmp_path: Path) -> None:
    fields = {"run": COUNTER, "local_dir": str(tmp_path), "stop": {"training_iteration": 1}}
    wrong = {"run": f"{COUNTER}Missing", "local_dir": str(tmp_path)}
    trials = tune.run_experiments({"one": fields, "two": wrong}, verbose=0, raise_on_failed_trial=False)
    assert [trial.status for trial in trials] == ["TERMINATED", "ERROR"]
    assert {Path(trial.local_dir).name for trial in trials} == {"one", "two"}
    with pytest.raises(tune.TuneError, match=r"1 of 1 trials failed:\n.*error\.txt"):
        tune.run(f"{COUNTER}Missing", name="three", local_dir=str(tmp_path), verbose=0)


class Sized(tune.Trainable):
    """Reports the size of what it was given."""

    def setup(self, config: dict[str, Any], data: list[int] = []) -> None:  # noqa: B006
        self.data = data

    def step(self) -> dict[str, Any]:
        return {"size": len(self.data), "done": True}


def sized(config: dict[str, Any], data: list[int] | None = None) -> None:
    tune.report(size=len(data or []))


SCRIPT = """
import sys
from counterpoint import tune
from tests.tune.test_start import Sized, sized

for trainable in (Sized, sized):
    analysis = tune.run(
        tune.with_parameters(trainable, data=[1, 2, 3]),
        name=trainable.__name__,
        config={"x": tune.grid_search([4, 5])},
        local_dir=sys.argv[1],
        progress_reporter=tune.CLIReporter(metric_columns={"size": "how many"}, max_progress_rows=1),
        sync_config=tune.SyncConfig(upload_dir=sys.argv[1] + "/copy"),
        verbose=0,
    )
    assert isinstance(analysis, tune.ExperimentAnalysis)
    last = analysis.trials[0].last_result
    print(last["size"], last["experiment_id"] == last["trial_id"], last["timesteps_total"], last["episodes_total"])
"""


@pytest.mark.slow
def test_what_users_of_ray_tune_write_beside(tmp_path: Path) -> None:
    """In a process of its own, since pytest's has threads, and such trials are forked."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    *_, head, row, more, last = ran.stdout.splitlines()
    assert head.split("  ")[-1] == "how many"
    assert row.split()[1:] == ["TERMINATED", "4", "3"]
    assert "1 more" in more
    assert last == "3 True None None"
    assert (tmp_path / "copy" / "Sized").is_dir()


def test_with_parameters_takes_what_the_trainable_takes() -> None:
    for wrong in (Sized, sized):
        with pytest.raises(tune.TuneError, match="cannot take nothing"):
            tune.with_parameters(wrong, nothing=1)
    for no_trainable in (3, Path):
        with pytest.raises(tune.TuneError, match="expected a function or a Trainable class"):
            tune.with_parameters(no_trainable, data=1)  # type: ignore[arg-type]


def test_resources_are_summed_up_as_ray_tune_does() -> None:
    resources = tune.Resources(2, 0.5, 2**29, extra_cpu=1, custom_resources={"licence": 3})
    assert (resources.cpu_total(), resources.gpu_total()) == (3, 0.5)
    assert resources.summary_string() == "3.0 CPUs, 0.5 GPUs, 0.5 GiB heap (3.0 licence)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sync_config": tune.SyncConfig("a"), "upload_dir": "b"}, "beside sync_config"),
        ({"name": "../up"}, "name = '../up'"),
        ({"num_samples": 0}, "num_samples = 0"),
        ({"max_failures": -2}, "max_failures = -2"),
        ({"keep_checkpoints_num": 0}, "keep_checkpoints_num = 0"),
        ({"checkpoint_freq": -1}, "checkpoint_freq = -1"),
        ({"stop": {"loss": "low"}}, r"stop\['loss'\] = 'low'"),
        ({"stop": {"loss": float("nan")}}, "not a number"),
        ({"resources_per_trial": {"cpus": 2}}, "resources_per_trial: there is no 'cpus'; expected some of cpu, gpu"),
        ({"mode": "least"}, "mode = 'least'"),
        ({"scheduler": "asha"}, "scheduler = 'asha'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(tune.TuneError, match=words):
        tune.run(COUNTER, local_dir=str(tmp_path), verbose=0, **arguments)
    assert not list(tmp_path.iterdir())


def test_what_describes_an_experiment_is_refused_beside_one(tmp_path: Path) -> None:
    """It would be passed over, since the experiment has its own."""
    experiment = tune.Experiment("one", COUNTER, local_dir=str(tmp_path))
    with pytest.raises(tune.TuneError, match="stop, num_samples: an Experiment is given"):
        tune.run(experiment, num_samples=3, stop={"count": 1}, verbose=0)


def test_a_trial_has_the_names_that_its_creators_give(tmp_path: Path) -> None:
    def name(trial: Trial) -> str:
        return f"lr{trial.config['lr']}"

    experiment = tune.Experiment(
        "names", COUNTER, local_dir=str(tmp_path), trial_name_creator=name, trial_dirname_creator=lambda trial: "here"
    )
    trial = experiment.make_trial("t1", {"lr": 0.1}, {"lr": 0.1}, "0_lr=0.1")
    assert str(trial) == "lr0.1"
    assert trial.logdir == str(tmp_path / "names" / "here")
    plain = tune.Experiment("names", COUNTER, local_dir=str(tmp_path))
    assert plain.make_trial("t1", {}, {}, "0_a/b=1").dirname == "Counter_t1_0_a_b=1"
    escaping = tune.Experiment("names", COUNTER, trial_dirname_creator=lambda trial: "../out")
    with pytest.raises(tune.TuneError, match="trial_dirname_creator returned"):
        escaping.make_trial("t1", {}, {}, "")


def test_what_is_no_json_is_refused_with_its_place() -> None:
    plain = tune.Experiment("names", COUNTER)
    assert plain.make_trial("t1", {"a": (1, {"b": None})}, {}, "").config == {"a": [1, {"b": None}]}
    with pytest.raises(tune.TuneError, match=r"config/a\[1\]: "):
        plain.make_trial("t1", {"a": [1, object()]}, {}, "")
    with pytest.raises(tune.TuneError, match="the key 3 is of type int"):
        plain.make_trial("t1", {"a": {3: 1}}, {}, "")


@pytest.mark.slow
@pytest.mark.parametrize("creator", ["trial_dirname_creator", "trial_name_creator"])
def test_trials_of_one_name_have_a_directory_each_and_keep_it(tmp_path: Path, creator: str) -> None:
    named: dict[str, Any] = {creator: lambda trial: "same" * 50}
    ends = {"training_iteration": 2}
    analysis = tune.run(COUNTER, local_dir=str(tmp_path), num_samples=3, stop=ends, verbose=0, **named)
    directories = {trial.logdir for trial in analysis.trials}
    assert len(directories) == 3
    for trial in analysis.trials:
        lines = (Path(trial.logdir) / "result.json").read_text().splitlines()
        assert {json.loads(line)["trial_id"] for line in lines} == {trial.trial_id}
        assert len(Path(trial.logdir).name) <= 130
