"""A branch in a new directory is a whole job, which goes on as the run that it comes from would have."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from counterpoint.cli.main import main
from counterpoint.job.admin.ask import Refused
from counterpoint.job.branch.begin import branch
from counterpoint.job.branch.kept import StepNotKept
from counterpoint.job.claim_directory import check_directory
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load, to_toml
from counterpoint.job.write_job import write_job
from counterpoint.orchestrator.early_warnings.watch import Watch
from counterpoint.run.branches import origin_of
from counterpoint.run.config import RunConfig
from counterpoint.transport.errors import UserError
from tests.job.branch.test_begin import FROM, STEPS, record_batches, with_trained, write_commits
from tests.support.jobs import shipped_line, write_lines
from tests.trainer.conftest import dense_directory as dense_directory
from tests.trainer.one_process_trainer import life, saved_state
from tests.trainer.orchestrator_end import write_run

LORA = {"rank": 2, "target_modules": ["q_proj", "down_proj"]}


def write_whole(job: Path, model: Path, lora: dict[str, Any] | None = LORA, **more: Any) -> RunConfig:
    """A job of one run, as a start leaves it, and what its orchestrator leaves of three steps."""
    training = {"learning_rate": 1e-3, "checkpoint_interval": 1, "lr_schedule": "linear", "lora": lora}
    run = {
        "run_id": "old",
        "steps": STEPS,
        "environments": [{"name": "reverse", "kind": "reverse-text"}],
        "training": training,
    }
    given = {
        "output_dir": str(job),
        "model": "named",
        "inference": {"dtype": "float32"},
        "trainer": {"threads": 1, "prometheus_port": 9400},
        "orchestrator": run,
        **more,
    }
    config = JobConfig.model_validate(given).with_port(8123).with_model(model)
    job.mkdir()
    write_job(config, to_toml(config).encode())
    write_run(config.orchestrator)
    write_commits(config.orchestrator, 1, FROM, 3)
    return config.orchestrator


@pytest.fixture
def original(tmp_path: Path) -> RunConfig:
    """A run that is kept at step 2, in a whole job, with a page and fine-tuning."""
    wire = {"address": f"ipc://{tmp_path}/wire", "credit": 2}
    config = write_whole(tmp_path / "one", tmp_path / "model", serve=True, prometheus_port=9500, transport=wire)
    return with_trained(config, FROM)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [LORA, None])
def test_a_branch_in_a_new_directory_takes_the_next_five_steps_bit_for_bit(
    dense_directory: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_whole(one, dense_directory, lora)
    with life(one, dense_directory, {"old": STEPS}, max_runs=1, keep_checkpoints=9) as trainer:
        trainer.until_step(old=STEPS)
    config = branch(one, "old", FROM, "new", {}, into=two)
    write_run(config)
    with life(two, dense_directory, {"new": STEPS}, max_runs=1, keep_checkpoints=9) as trainer:
        trainer.until_step(new=STEPS)
    for step in range(FROM, STEPS + 1):
        old, new = saved_state(one, "old", step), saved_state(two, "new", step)
        assert all(torch.equal(old[name], new[name]) for name in old | new), step


@pytest.mark.parametrize("links", [True, False])
def test_the_new_job_can_be_started_by_what_the_command_says(
    original: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    job = original.output_dir
    lines = [{"run_id": run, "step": step} for step in (1, 2, 3) for run in ("old", "other")]
    write_lines(job / "trainer" / "metrics.jsonl", lines)
    directory = job.parent / "new job"

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    asked = ["branch", "old", "--as", "new", "training.learning_rate=2e-5", "--into", str(directory), "--job", str(job)]
    assert main(asked) == 0
    assert f"to start it: counterpoint run '{directory}/job.toml' --resume" in capsys.readouterr().out
    config = load(JobConfig, directory / "job.toml", ["--resume=true"])
    check_directory(config, fresh=False)
    (run,) = config.every_run
    assert (run.run_id, run.training.learning_rate, config.trainer.output_dir) == ("new", 2e-5, directory)
    assert (config.inference.dtype, config.trainer.threads, config.trainer.max_runs) == ("float32", 1, 1)
    assert config.model == str(job.parent / "model"), "which a name may no longer mean"
    assert config.serve is not None
    ports = (config.inference.port, config.trainer.prometheus_port, config.prometheus_port, config.serve.port)
    assert ports == (0, 0, 0, 0), "those of the other job may be in use"
    assert (config.transport.address, run.transport.address, config.transport.credit) == (None, None, 2)
    assert config.inference.identity_file == directory / "servers.key"
    assert (directory / "servers.key").read_bytes() != (job / "servers.key").read_bytes()
    assert {path.name for path in (directory / "roles").iterdir()} >= {"trainer.toml", "orchestrator.toml"}
    state = [
        root / "checkpoints" / "step_2" / "state.safetensors"
        for root in (job / "trainer/old", directory / "trainer/new")
    ]
    assert state[0].samefile(state[1]) == links
    assert state[0].read_bytes() == state[1].read_bytes()
    origin = origin_of(run.run_dir)
    assert origin is not None
    assert (origin.job, origin.run, origin.step) == (str(job), "old", FROM)
    metrics = (directory / "trainer" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in metrics] == [{"run_id": "new", "step": step} for step in (1, 2)]


def test_early_warnings_of_a_new_job_take_no_other_runs_figures(original: RunConfig) -> None:
    lines = [{"run_id": "old", "step": step, "entropy": float(step)} for step in (1, 2, 3)]
    write_lines(original.output_dir / "trainer" / "metrics.jsonl", lines)
    directory = original.output_dir.parent / "two"
    branch(original.output_dir, "old", FROM, "new", {}, into=directory)
    write_lines(directory / "trainer" / "metrics.jsonl", [line | {"entropy": 9.0} for line in lines])  # a guest's
    watch = Watch(directory, "new", {}, lambda: True)
    watch.take(shipped_line(4, 104.0))
    assert watch._seen is not None
    assert watch._seen.points("entropy") == [(1, 1.0), (2, 2.0)]


def test_a_directory_with_something_in_it_is_refused_and_stays(original: RunConfig) -> None:
    directory = original.output_dir.parent / "two"
    directory.mkdir()
    branch(original.output_dir, "old", FROM, "new", {}, into=directory)
    before = sorted(directory.rglob("*"))
    with pytest.raises(Refused, match=r"it has something in it, such as .*; name a new directory"):
        branch(original.output_dir, "old", FROM, "newer", {}, into=directory)
    assert sorted(directory.rglob("*")) == before


def test_a_preparation_of_a_new_job_that_was_killed_is_made_anew(
    original: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    directory = original.output_dir.parent / "two"
    with monkeypatch.context() as patch:
        patch.setattr("counterpoint.job.branch.begin._take_lines", killed)
        with pytest.raises(KeyboardInterrupt):
            branch(original.output_dir, "old", FROM, "new", {}, into=directory)
    assert origin_of(branch(original.output_dir, "old", FROM, "new", {}, into=directory).run_dir) is not None


def test_a_kill_before_anything_was_written_leaves_no_name_taken(original: RunConfig) -> None:
    directory = original.output_dir.parent / "two"
    (directory / "run_new").mkdir(parents=True)
    (directory / "mine").touch()
    with pytest.raises(Refused, match="it has something in it, such as mine"):
        branch(original.output_dir, "old", FROM, "new", {}, into=directory)
    (directory / "mine").unlink()
    assert origin_of(branch(original.output_dir, "old", FROM, "new", {}, into=directory).run_dir) is not None


@pytest.mark.parametrize("name", [".", "sub", "run_sub", "trainer/x"])
def test_a_directory_within_the_job_is_refused(original: RunConfig, name: str) -> None:
    with pytest.raises(Refused, match="within the job"):
        branch(original.output_dir, "old", FROM, "new", {}, into=original.output_dir / name)


@pytest.mark.parametrize(
    "change", [{"inference.urls": '["http://127.0.0.1:1"]'}, {"transport.credit": "2"}, {"prometheus_port": "9777"}]
)
def test_a_key_that_the_job_sets_is_refused(original: RunConfig, change: dict[str, str]) -> None:
    directory = original.output_dir.parent / "two"
    with pytest.raises(Refused, match=f"{next(iter(change))} is set by the job"):
        branch(original.output_dir, "old", FROM, "new", change, into=directory)
    assert not directory.exists()


def test_a_guest_that_would_begin_with_other_weights_is_refused(original: RunConfig) -> None:
    record_batches(original, 1, 2)
    guest = original.model_copy(update={"seed": 3})
    (original.run_dir / "control" / "orch.toml").write_text(to_toml(guest))
    branch(original.output_dir, "old", FROM, "new", {}, into=original.output_dir.parent / "two")
    directory = original.output_dir.parent / "three"
    with pytest.raises(StepNotKept, match=r"those of seed = 0 .* become those of seed = 3"):
        branch(original.output_dir, "old", FROM, "new", {}, ["1-1"], into=directory)
    assert not directory.exists()


@pytest.mark.parametrize("content", [None, "{}", '{"inference": 3}'])
def test_without_the_job_there_is_no_new_one(original: RunConfig, content: str | None) -> None:
    file = original.output_dir / "job.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=r"job\.json"):
        branch(original.output_dir, "old", FROM, "new", {}, into=original.output_dir.parent / "two")
    assert not (original.output_dir.parent / "two").exists()
