"""A branch goes on as the run that it comes from would have: bit for bit, or with the keys that it was given."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from counterpoint.cli.main import main
from counterpoint.job.admin.ask import NotThere, Refused
from counterpoint.job.branch.begin import branch
from counterpoint.job.branch.kept import StepNotKept, kept_of
from counterpoint.job.configuration.load import to_toml
from counterpoint.orchestrator.changes import read_changes
from counterpoint.orchestrator.early_warnings.watch import Watch
from counterpoint.orchestrator.step.checkpoint import StepCheckpoint, identity_of, load_newest, write_checkpoint
from counterpoint.run.branches import BRANCH_FILE, BranchOrigin, origin_of
from counterpoint.run.changes import LEARNING_RATE, Change, LearningRates, write_journal
from counterpoint.run.config import OverlongConfig, RunConfig
from counterpoint.trainer.again.kept import NotKept, find
from counterpoint.transport import codec
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import publish_directory
from counterpoint.transport.messages import Bye, Hello
from counterpoint.transport.records import Batch
from counterpoint.verify.report import NO_RECEIPTS
from counterpoint.verify.run import verify
from tests.support.jobs import shipped_line, write_lines
from tests.trainer import one_process_trainer
from tests.trainer.conftest import dense_directory as dense_directory
from tests.trainer.conftest import make_batch
from tests.trainer.one_process_trainer import broadcast, life, saved_state, write_member
from tests.trainer.orchestrator_end import write_run

STEPS = 7
FROM = 2
"""The step that the branches go on from; a checkpoint of the trainer is written at every second one."""

SCHEDULER = {"next_group_id": 17, "mix": {"drawn": {"reverse": 17}}}


def write_commits(config: RunConfig, *steps: int, keep: int = 9) -> None:
    """What an orchestrator leaves of its committed steps."""
    for step in steps:
        write_checkpoint(config.run_dir, StepCheckpoint(step, identity_of(config), SCHEDULER, {}, []), keep)
    write_lines(
        config.run_dir / "metrics.jsonl", [shipped_line(step, 100.0 + step) for step in range(1, max(steps) + 1)]
    )


def write_original(output_dir: Path, model: Path, **training: Any) -> RunConfig:
    training = {"lr_schedule": "linear", "warmup_steps": 2, **training}
    config = write_member(output_dir, model, "old", STEPS, **training)
    write_commits(config, 1, FROM, 3)
    return config


def same_steps(output_dir: Path, exact: bool) -> None:
    """Asserts that both runs have published the same weights after each step that they do not have in common."""
    before = broadcast(output_dir, "old", FROM)
    for step in range(FROM, STEPS + 1):
        old, new = broadcast(output_dir, "old", step), broadcast(output_dir, "new", step)
        assert old.keys() == new.keys()
        for name, tensor in old.items():
            if exact:
                assert torch.equal(tensor, new[name]), (step, name)
            else:
                far = (tensor - before[name]).norm()
                assert (tensor - new[name]).norm() <= 1e-5 * far + 1e-12, (step, name)


@pytest.mark.slow
def test_a_branch_without_a_change_takes_the_next_five_steps_bit_for_bit(dense_directory: Path, tmp_path: Path) -> None:
    write_original(tmp_path, dense_directory)
    with life(tmp_path, dense_directory, {"old": STEPS}, max_runs=1, keep_checkpoints=9) as one:
        one.until_step(old=STEPS)
    config = branch(tmp_path, "old", FROM, "new", {})
    assert config.resume
    write_run(config)
    with life(tmp_path, dense_directory, {"new": STEPS}, max_runs=1, keep_checkpoints=9) as one:
        one.until_step(new=STEPS)
    same_steps(tmp_path, exact=True)
    old, new = saved_state(tmp_path, "old", STEPS), saved_state(tmp_path, "new", STEPS)
    assert all(torch.equal(old[name], new[name]) for name in old | new), "moments, too"


@pytest.mark.slow
def test_a_branch_beside_the_original_takes_the_same_steps_in_shared_rows(
    dense_directory: Path, tmp_path: Path
) -> None:
    write_original(tmp_path, dense_directory)
    committed = {"old": FROM}
    with life(tmp_path, dense_directory, committed, keep_checkpoints=9) as one:
        one.until_step(old=FROM)
        write_run(branch(tmp_path, "old", None, "new", {}))
        committed |= {"old": STEPS, "new": STEPS}
        one.wire.say("new", Hello("new", FROM))
        one.until_step(old=STEPS, new=STEPS)
    same_steps(tmp_path, exact=False)


@pytest.mark.slow
def test_full_weights_branch_too(dense_directory: Path, tmp_path: Path) -> None:
    write_original(tmp_path, dense_directory, lora=None)
    with life(tmp_path, dense_directory, {"old": 4}, max_runs=1, keep_checkpoints=9) as one:
        one.until_step(old=4)
        one.wire.say("old", Bye("old"))
    write_run(branch(tmp_path, "old", FROM, "new", {}))
    with life(tmp_path, dense_directory, {"new": 4}, max_runs=1, keep_checkpoints=9) as one:
        one.until_step(new=4)
    old, new = saved_state(tmp_path, "old", 4), saved_state(tmp_path, "new", 4)
    assert all(torch.equal(old[name], new[name]) for name in old | new)


def record_batches(config: RunConfig, *steps: int) -> None:
    """What an orchestrator leaves of batches that the trainer has no checkpoint of."""
    for step in steps:
        with publish_directory(config.run_dir / "rollouts" / f"step_{step}") as directory:
            codec.write_file(directory / "batch.bin", make_batch(step, run_id=config.run_id))


def recorded(config: RunConfig, step: int) -> Batch:
    return codec.read_file(config.run_dir / "rollouts" / f"step_{step}" / "batch.bin", 2**30)


@pytest.mark.slow
def test_a_branch_without_some_data_trains_the_rest_of_it_again(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = write_original(tmp_path, dense_directory)
    record_batches(original, 1, 2, 3)
    with life(tmp_path, dense_directory, {"old": 4}, max_runs=1, keep_checkpoints=9) as one:
        one.until_step(old=4)
        one.wire.say("old", Bye("old"))
    branches = {
        "same": branch(tmp_path, "old", 3, "same", {"training.learning_rate": "1"}),
        "less": branch(tmp_path, "old", 3, "less", {}, ["3-1"]),
        "none": branch(tmp_path, "old", 3, "none", {}, ["guess"]),
    }
    assert {len(recorded(config, 3).samples) for config in branches.values()} == {4, 3, 2}
    shutil.rmtree(tmp_path / "trainer" / "old" / "checkpoints" / "step_2")
    branches["anew"] = branch(tmp_path, "old", 3, "anew", {})
    branches["early"] = branch(tmp_path, "old", 3, "early", {}, ["1-1"])
    assert [recorded(branches["early"], step).run_id for step in (1, 2, 3)] == ["early"] * 3
    assert recorded(branches["less"], 3).run_id == "less"
    monkeypatch.setattr(
        one_process_trainer, "make_batch", lambda step, run_id: recorded(branches[run_id], step)
    )  # fmt: skip
    for run_id, config in branches.items():
        write_run(config)
        with life(tmp_path, dense_directory, {run_id: 3}, max_runs=1, keep_checkpoints=9) as one:
            one.until_step(**{run_id: 3})
    weights = {run_id: broadcast(tmp_path, run_id, 3) for run_id in ("old", *branches)}
    same = {
        run_id: all(torch.equal(weights["old"][name], each[name]) for name in each) for run_id, each in weights.items()
    }
    assert same == {"old": True, "same": True, "less": False, "none": False, "anew": True, "early": False}


def with_trained(config: RunConfig, *steps: int) -> RunConfig:
    """What a trainer leaves of checkpoints, as far as a branch reads it."""
    for step in steps:
        directory = config.output_dir / "trainer" / config.run_id / "checkpoints" / f"step_{step}"
        directory.mkdir(parents=True)
        progress = {"step": step, "total_tokens": 12, "schedule_offset": 0, "batch": "b"}
        (directory / "state.json").write_text(json.dumps({"format": 1, "run_id": config.run_id, "progress": progress}))
        (directory / "state.safetensors").write_bytes(b"weights")
        (directory / "STABLE").touch()
    return config


@pytest.fixture
def original(tmp_path: Path) -> RunConfig:
    """A run without weights that is kept at step 2."""
    return with_trained(write_original(tmp_path, tmp_path / "model"), FROM)


def test_a_branch_has_the_state_of_the_step_and_says_where_it_comes_from(original: RunConfig) -> None:
    job = original.output_dir
    write_journal(
        original.run_dir,
        [
            Change(request_id="a", step=2, changes={"sampling.temperature": 0.7}, given={"sampling.temperature": 0.9}),
            Change(request_id="b", step=3, changes={"sampling.temperature": 0.1}, given={"sampling.temperature": 0.9}),
        ],
    )
    assert kept_of(job, "old").steps == [FROM]
    config = branch(job, "old", FROM, "new", {"training.learning_rate": "2e-5", "environments.0.ratio": "3"})
    assert (config.run_id, config.resume, config.training.learning_rate) == ("new", True, 2e-5)
    assert config.sampling.temperature == 0.7, "as in force at the step"
    assert config.environments[0].ratio == 3
    resumed = load_newest(config)
    assert resumed is not None
    assert (resumed.step, resumed.scheduler) == (FROM, SCHEDULER)
    origin = origin_of(config.run_dir)
    assert origin is not None
    assert (origin.run, origin.step, origin.changes["training.learning_rate"]) == ("old", FROM, "2e-5")
    state = json.loads((job / "trainer/new/checkpoints/step_2/state.json").read_text())
    assert (state["run_id"], state["progress"]["total_tokens"]) == ("new", 12)
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2], "the early warnings begin with them"


@pytest.mark.parametrize(
    ("run", "step", "name", "changes", "error", "words"),
    [
        ("old", 3, "new", {}, StepNotKept, "step 3 of run old was not kept: it can go on from 2"),
        ("other", 2, "new", {}, NotThere, "there is no run 'other'"),
        ("old", 2, "old", {}, Refused, "there is a run old already"),
        ("old", 2, "no name", {}, UserError, "run_id"),
        ("old", 2, "new", {"model": "other"}, Refused, "model cannot be another in a branch"),
        ("old", 2, "new", {"training.lora.rank": "4"}, Refused, "training.lora.rank cannot be another"),
        ("old", 2, "new", {"seed": "4"}, Refused, "seed cannot be another"),
        ("old", 2, "new", {"environments.0.kind": "guess-number"}, Refused, "environments cannot be another"),
        ("old", 2, "new", {"training.learning_rat": "4"}, UserError, "learning_rat"),
        ("old", 2, "new", {"training.learning_rate": "-4"}, UserError, "training.learning_rate"),
    ],
)
def test_what_cannot_be_is_refused_with_nothing_left(
    original: RunConfig, run: str, step: int, name: str, changes: dict[str, str], error: type[UserError], words: str
) -> None:
    with pytest.raises(error, match=words):
        branch(original.output_dir, run, step, name, changes)
    assert sorted(path.name for path in original.output_dir.glob("*new*")) == []
    assert not list(original.output_dir.glob(".branch*"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"run_id": "other"}, "it is of run 'other'; expected 'old'"),
        ({"progress": {"step": 4}}, "it is of step 4; expected 2"),
        ({"format": 99}, "a newer version"),
        ({"progress": 3}, r"state\.json is 3; expected a table"),
    ],
)
def test_a_checkpoint_that_is_not_of_the_run_and_step_is_no_branchs(
    original: RunConfig, changed: dict[str, Any], words: str
) -> None:
    state = original.output_dir / "trainer/old/checkpoints/step_2/state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | changed))
    with pytest.raises(UserError, match=words):
        branch(original.output_dir, "old", FROM, "new", {})


def test_a_preparation_that_was_killed_is_made_anew(original: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("counterpoint.job.branch.begin.take_over", killed)
        with pytest.raises(KeyboardInterrupt):
            branch(original.output_dir, "old", FROM, "new", {})
    config = branch(original.output_dir, "old", FROM, "new", {})
    assert origin_of(config.run_dir) is not None
    with pytest.raises(Refused, match="there is a run new already"):
        branch(original.output_dir, "old", FROM, "new", {})


def test_a_preparation_that_was_killed_before_its_mark_is_made_anew(original: RunConfig) -> None:
    (original.output_dir / "run_new").mkdir()
    assert origin_of(branch(original.output_dir, "old", FROM, "new", {}).run_dir) is not None


def test_a_branch_stays_whose_preparation_was_killed_at_its_end(original: RunConfig) -> None:
    config = branch(original.output_dir, "old", FROM, "new", {})
    (config.run_dir / ".branching").touch()  # its removal is what the kill prevented
    with pytest.raises(Refused, match="there is a run new already"):
        branch(original.output_dir, "old", FROM, "new", {})
    assert origin_of(config.run_dir) is not None


def test_the_command_says_how_to_start_it_and_what_was_not_kept(
    original: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(original.output_dir)
    assert main(["branch", "old", "--step", "3", "--as", "new", "--job", job]) == 3
    assert "step 3 of run old was not kept" in capsys.readouterr().err
    assert main(["branch", "old", "--as", "new", "training.learning_rate=2e-5", "--job", job]) == 0
    said = capsys.readouterr().out
    assert "run new goes on from step 2 of run old" in said
    assert "run_new/branch.toml" in said
    assert main(["branch", "old", "--as", "new", "--job", job]) == 2


def test_steps_that_are_trained_again_have_the_rate_that_they_had(original: RunConfig) -> None:
    record_batches(original, 2, 3)
    faster = Change(request_id="a", step=3, changes={LEARNING_RATE: 5e-3}, given={LEARNING_RATE: 1e-3})
    write_journal(original.run_dir, [faster])
    job = original.output_dir
    assert kept_of(job, "old").steps == [2, 3]
    with pytest.raises(StepNotKept, match="max_grad_norm cannot be another from step 4 on"):
        branch(job, "old", 3, "new", {"training.max_grad_norm": "2"})
    config = branch(job, "old", 3, "new", {LEARNING_RATE: "2e-5"})
    rates = LearningRates(config.run_dir)
    assert [rates.at(step) for step in (2, 3, 4, 5)] == [None, 5e-3, 2e-5, 2e-5]
    assert read_changes(config, 3)[0] == config, "nothing was edited since"
    origin = origin_of(config.run_dir)
    assert origin is not None
    assert (origin.step, origin.trained) == (3, 2)


def test_no_step_is_trained_again_at_which_another_run_was_copied(original: RunConfig) -> None:
    record_batches(original, 3)
    assert kept_of(original.output_dir, "old").steps == [2, 3]
    lines = [{"run_id": run, "step": 3, "copied/run": "best", "copied/step": 9} for run in ("other", "old")]
    write_lines(original.output_dir / "trainer" / "metrics.jsonl", lines[:1])
    assert kept_of(original.output_dir, "old").steps == [2, 3]
    write_lines(original.output_dir / "trainer" / "metrics.jsonl", lines)
    assert kept_of(original.output_dir, "old").steps == [2]
    with pytest.raises(NotKept, match="step 3 of run old was not trained: it is a copy of step 9 of run best"):
        find(original.output_dir, "old", 3, 2**30)
    (original.output_dir / "trainer" / "metrics.jsonl").unlink()
    write_lines(original.output_dir / "trainer" / "metrics.jsonl", [{**lines[1], "step": 2}])
    record_batches(original, 1, 2)
    assert find(original.output_dir, "old", 3, 2**30, at_most=0).first == 2, "the checkpoint after the copy"


@pytest.mark.parametrize(
    ("without", "words"),
    [
        (["7-1"], "no rollout, environment or example"),
        (["reverse", "guess"], "nothing would be left of step 3, .*: --step 2"),
    ],
)
def test_what_cannot_be_left_out_is_refused(original: RunConfig, without: list[str], words: str) -> None:
    record_batches(original, 3)
    with pytest.raises(UserError, match=words):
        branch(original.output_dir, "old", 3, "new", {}, without)


def test_an_example_is_left_out_by_its_index(original: RunConfig) -> None:
    record_batches(original, 3)
    lines = [
        {"rollout_id": f"3-{index}", "environment": name, "example_index": index}
        for index, name in enumerate(("reverse", "guess", "reverse", "guess"))
    ]
    write_lines(original.run_dir / "rollouts" / "step_3" / "rollouts.jsonl", lines)
    config = branch(original.output_dir, "old", 3, "new", {}, ["reverse:2"])
    assert [each.rollout_id for each in recorded(config, 3).samples] == ["3-0", "3-1", "3-3"]


def test_from_which_step_on_something_is_left_out_is_said(
    original: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    record_batches(original, 3)
    asked = ["branch", "old", "--step", "3", "--prepare", "--job", str(original.output_dir)]
    assert main([*asked, "--as", "less", "--without", "guess"]) == 0
    said = capsys.readouterr().out
    assert "left out of step 3, not of steps 1 to 2, which had been trained with it and cannot be again," in said
    assert "and played on after step 3: guess" in said
    origin = origin_of(original.output_dir / "run_less")
    assert origin is not None
    assert origin.without_from == 3
    assert main([*asked, "--as", "one", "--without", "3-1"]) == 0
    assert "left out" not in capsys.readouterr().out, "no other step has a rollout"


def test_a_branch_that_has_no_step_of_its_own_has_no_receipts_and_no_damage(original: RunConfig) -> None:
    config = branch(original.output_dir, "old", FROM, "new", {})
    assert verify(config.run_dir).code == NO_RECEIPTS


def test_the_penalty_for_length_follows_the_longest_completion(original: RunConfig) -> None:
    file = original.run_dir / "control" / "orch.toml"
    given = original.table() | {"advantage": {"overlong": {"penalty": 0.5}}, "sampling": {"max_tokens": 100}}
    file.write_text(to_toml(RunConfig.model_validate(given)))
    config = branch(original.output_dir, "old", FROM, "new", {"sampling.max_tokens": "200"})
    assert config.advantage.overlong == OverlongConfig(longest=200, buffer=40, penalty=0.5)


def test_a_branch_of_a_former_version_has_trained_no_step_again(tmp_path: Path) -> None:
    (tmp_path / BRANCH_FILE).write_text('{"format": 1, "run": "old", "step": 7, "changes": {}, "head": ""}')
    assert origin_of(tmp_path) == BranchOrigin(run="old", step=7, trained=7)


def test_early_warnings_count_from_the_steps_of_the_run_that_it_comes_from(original: RunConfig) -> None:
    write_lines(
        original.output_dir / "trainer" / "metrics.jsonl",
        [{"run_id": "old", "step": step, "entropy": float(step)} for step in (1, 2, 3)]
        + [{"run_id": "new", "step": 3, "entropy": 9.0}],
    )
    branch(original.output_dir, "old", FROM, "new", {})
    watch = Watch(original.output_dir, "new", {}, lambda: True)
    watch.take(shipped_line(4, 104.0))
    assert watch._seen is not None
    assert watch._seen.points("entropy") == [(1, 1.0), (2, 2.0), (3, 9.0)]


@pytest.mark.parametrize("text", ["training = 3\n", "[training]\nlora = 3\n"])
def test_a_configuration_of_any_kind_is_read(tmp_path: Path, text: str) -> None:
    config = write_original(tmp_path, tmp_path / "model")
    (config.run_dir / "control" / "orch.toml").write_text(text)
    assert kept_of(tmp_path, "old").committed == [1, FROM, 3]


def test_metrics_of_the_trainer_that_are_no_file_are_refused(tmp_path: Path) -> None:
    write_original(tmp_path, tmp_path / "model")
    (tmp_path / "trainer").mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "trainer" / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        kept_of(tmp_path, "old")
