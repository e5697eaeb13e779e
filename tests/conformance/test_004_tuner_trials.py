"""Document 004: what a trial may be given, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.tune import Resources, Trial, TrialRunner, TuneError
from tests.conformance.thread_executor import run
from tests.tune.runner.scripted import ScriptedExecutor


def test_resources_are_those_of_the_document() -> None:
    names = [
        "cpu",
        "gpu",
        "memory",
        "object_store_memory",
        "extra_cpu",
        "extra_gpu",
        "extra_memory",
        "extra_object_store_memory",
    ]
    assert [*Resources.model_fields] == [*names, "custom_resources", "extra_custom_resources"]
    resources = Resources(1, 0, custom_resources={"slot": 1}, extra_cpu=2, extra_custom_resources={"slot": 2})
    assert resources.totals() == {"cpu": 3, "slot": 3}
    in_order = Resources(1, 2, 3, 4, 5, 6, 7, 8, None, {"slot": 9})
    assert [getattr(in_order, name) for name in names] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (in_order.custom_resources, in_order.extra_custom_resources) == ({}, {"slot": 9})


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("trial_id", "../elsewhere", "letters, digits"),
        ("resources", 3, "expected tune.Resources"),
        ("resources", {"cpus": 1}, "there is no 'cpus'"),
        ("resources", {"cpu": None}, "valid number"),
        ("stopping_criterion", 7, "expected a dict"),
        ("stopping_criterion", {"loss": "3"}, "the number at which to stop"),
        ("stopping_criterion", {"loss": float("nan")}, "no result reaches"),
        ("checkpoint_freq", -1, "expected 0 or more"),
        ("keep_checkpoints_num", 0, "expected 1 or more"),
        ("max_failures", -2, "expected 0 or more"),
        ("log_to_file", 3, "expected True"),
        ("log_to_file", ("out",), "expected True"),
        ("loggers", 3, "expected a list of classes"),
        ("export_formats", ["pickle"], "no format 'pickle'"),
    ],
)
def test_what_a_trial_cannot_have_is_refused_when_it_is_made(argument: str, value: Any, words: str) -> None:
    with pytest.raises(TuneError, match=f"(?s){argument}.*{words}"):
        Trial("module:scripted", **{argument: value})


def test_a_trials_resources_may_be_a_dict() -> None:
    assert Trial("module:scripted", resources={"cpu": 2, "extra_gpu": 1}).resources == Resources(cpu=2, extra_gpu=1)  # type: ignore[arg-type]


def test_checkpoints_that_nobody_can_rank_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trials = [
        Trial("m:f", {"script": [1, 2, 3]}, name, str(tmp_path), checkpoint_freq=1, keep_checkpoints_num=2)
        for name in ("ranked", "unranked")
    ]
    trials[1].checkpoint_score_attr = "min-vlaue"
    run(ScriptedExecutor(), tmp_path, trials)
    warned = [record.message for record in caplog.records if "checkpoint_score_attr" in record.message]
    assert len(warned) == 1
    assert "min-vlaue" in warned[0]
    assert "nearest is 'value'" in warned[0]


def test_a_trainable_that_nobody_registered_is_refused_when_the_trial_is_made() -> None:
    with pytest.raises(TuneError, match="'nothing'"):
        Trial("nothing")


def test_numbers_of_numpy_in_a_configuration_are_pythons() -> None:
    given = {"x": np.float32(0.5), "y": {"n": np.int64(3)}, "z": [np.bool_(True), (np.arange(2),)]}
    config = Trial("m:f", given).config
    assert config == {"x": 0.5, "y": {"n": 3}, "z": [True, ([0, 1],)]}
    assert [type(config["x"]), type(config["y"]["n"]), type(config["z"][0])] == [float, int, bool]


def test_numbers_of_numpy_among_a_trials_arguments_are_pythons(tmp_path: Path) -> None:
    """They are journalled as well."""
    numbers = {"checkpoint_freq": np.int64(2), "keep_checkpoints_num": np.int32(1), "max_failures": np.int8(3)}
    trial = Trial("m:f", {"script": [1, 2]}, stopping_criterion={"loss": np.float64(0.5)}, **numbers)  # type: ignore[arg-type]
    kept = [trial.stopping_criterion["loss"], *(getattr(trial, name) for name in numbers)]
    assert kept == [0.5, 2, 1, 3]
    assert [type(each) for each in kept] == [float, int, int, int]


@pytest.mark.parametrize("given", [None, 5, ScriptedExecutor, print])
def test_a_trainable_that_is_no_name_is_refused(given: Any) -> None:
    with pytest.raises(TuneError, match=r"trainable_name.*module:name"):
        Trial(given)


def test_a_finished_experiment_goes_on_beside_its_runner_and_ends_only_once(tmp_path: Path) -> None:
    """In a notebook, nobody has closed the runner of the cell before."""

    def runner(**arguments: Any) -> TrialRunner:
        return TrialRunner(local_checkpoint_dir=tmp_path, trial_executor=ScriptedExecutor(), verbose=0, **arguments)

    first = runner()
    first.add_trial(Trial("module:scripted", {"script": [1, 2]}, "one", str(tmp_path)))
    with pytest.raises(TuneError, match="runs this experiment"):
        runner(resume=True)
    while not first.is_finished():
        first.step()
    with pytest.raises(TuneError, match="is_finished"):
        first.step()
    second = runner(resume=True)
    second.add_trial(Trial("module:scripted", {"script": [1, np.int64(2)]}, "two", str(tmp_path)))
    for late in (first.step, lambda: first.add_trial(Trial("module:scripted")), first.request_stop_experiment):
        with pytest.raises(TuneError, match="is closed"):
            late()
    first.close()
    while not second.is_finished():
        second.step()
    second.close()
    assert [(trial.trial_id, trial.status) for trial in second.get_trials()] == [
        ("one", "TERMINATED"),
        ("two", "TERMINATED"),
    ]
