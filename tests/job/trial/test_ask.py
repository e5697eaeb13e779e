"""What a trial refuses before anything is written, and by what its branches are measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from counterpoint.job.admin.ask import NotThere, Refused
from counterpoint.job.branch.configuration import branched_config
from counterpoint.job.branch.kept import StepNotKept
from counterpoint.job.trial.ask import SHARE, asked_of, changes_of, trial_name
from counterpoint.job.trial.decisions import SIDES
from counterpoint.job.trial.record import TrialAsked, TrialRecord
from counterpoint.run.branches import BRANCH_FILE, BranchOrigin
from counterpoint.run.config import RunConfig
from counterpoint.transport.errors import UserError
from tests.job.branch.test_begin import FROM, STEPS, with_trained, write_original
from tests.trainer.orchestrator_end import write_run

HELD = {"name": "held", "interval": 7, "environments": [{"name": "reverse", "kind": "reverse-text"}]}


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    """A run that is kept at step 2, with two evaluations, in a job that does not run."""
    known = with_trained(write_original(tmp_path, tmp_path / "model"), FROM)
    config = RunConfig.model_validate(
        known.table() | {"sampling": {"temperature": 0.7}, "evaluations": [HELD, HELD | {"name": "other"}]}
    )
    write_run(config)
    (tmp_path / "job.json").write_text("{}")
    return config


@pytest.mark.parametrize(
    ("changes", "more", "error", "words"),
    [
        ({"evaluations.0.interval": "3"}, {}, UserError, "evaluations.0.interval cannot be tried"),
        ({"opponents.old.url": "x"}, {}, UserError, "opponents.old.url cannot be tried"),
        ({"steps": "3"}, {}, UserError, "steps cannot be tried"),
        ({"seed": "3"}, {}, Refused, "seed cannot be another"),
        ({"training.learning_rat": "3"}, {}, UserError, "training.learning_rat"),
        ({}, {"step": 1}, StepNotKept, "step 1 of run old was not kept"),
        ({}, {"evaluation": "absent"}, NotThere, "there is no evaluation 'absent'; run old has held, other"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_nothing_left(
    run: RunConfig, changes: dict[str, str], more: dict[str, Any], error: type[UserError], words: str
) -> None:
    job = run.output_dir
    before = sorted(job.rglob("*"))
    with pytest.raises(error, match=words):
        asked_of(job, "old", changes, 10, **more)
    assert sorted(job.rglob("*")) == before


def test_a_run_without_held_out_examples_or_another_step_is_refused(run: RunConfig) -> None:
    write_run(run.model_copy(update={"evaluations": []}))
    with pytest.raises(UserError, match="run old has no evaluations"):
        asked_of(run.output_dir, "old", {}, 10)
    write_run(run.model_copy(update={"steps": FROM}))
    with pytest.raises(UserError, match="run old has no step after 2: steps = 2"):
        asked_of(run.output_dir, "old", {}, 10)


def test_both_branches_are_measured_as_the_run_is(run: RunConfig) -> None:
    """Also where the change is of what the evaluation has from the run: its sampling."""
    record, job = TrialRecord(run.output_dir, "try"), run.output_dir
    changes = {"sampling.temperature": "1.5", "environments.0.args.seed": "9"}
    asked = TrialAsked(run="old", step=FROM, changes=changes, tokens=1, evaluation="other", interval=3)
    plain, changed = (
        branched_config(job, "old", FROM, record.branch(side), changes_of(job, record, asked, side))
        for side in ("without", "with")
    )
    assert (plain.sampling.temperature, changed.sampling.temperature) == (0.7, 1.5)
    assert (plain.steps, changed.steps) == (STEPS, STEPS)
    assert plain.evaluations == changed.evaluations
    (own,) = changed.evaluations
    assert (own.name, own.interval, own.share, own.at_start) == ("other", 3, SHARE, False)
    (environment,) = own.environments
    assert changed.sampling_of(environment, own).temperature == 0.7
    assert environment == run.evaluations[1].environments[0]


def test_a_trial_that_was_begun_goes_on_with_what_was_asked(run: RunConfig) -> None:
    with pytest.raises(UserError):  # the job does not run
        asked_of(run.output_dir, "old", {}, 10)
    asked = TrialAsked(run="old", step=FROM, changes={}, tokens=10, evaluation="held", interval=3)
    record = TrialRecord(run.output_dir, trial_name("old", {}, 10, None, None))
    record.directory.mkdir(parents=True)
    record.begin(asked)
    with pytest.raises(UserError):  # it is asked anew, since there is no branch
        asked_of(run.output_dir, "old", {}, 10)
    record.run_dir("without").mkdir()
    origin = BranchOrigin(run="old", step=FROM, trained=FROM)
    (record.run_dir("without") / BRANCH_FILE).write_text(origin.model_dump_json())
    assert asked_of(run.output_dir, "old", {}, 10)[1] == asked
    (record.directory / "asked.json").write_text(json.dumps({"run": "old"}))
    with pytest.raises(UserError, match=r"asked\.json cannot be used"):
        asked_of(run.output_dir, "old", {}, 10)


def test_a_run_with_a_long_id_can_be_tried_under_a_name_of_its_own(run: RunConfig) -> None:
    names = {}
    for run_id in ("r" * 43, "r" * 44, "r" * 63 + "a", "r" * 63 + "b"):
        names[run_id] = trial_name(run_id, {}, 10, None, None)
        for side in SIDES:
            branch = TrialRecord(run.output_dir, names[run_id]).branch(side)
            assert branched_config(run.output_dir, "old", FROM, branch, {}).run_id == branch
    assert len({*names.values()}) == 4
    assert names["r" * 43].removeprefix("r" * 43) == trial_name("old", {}, 10, None, None).removeprefix("old")
