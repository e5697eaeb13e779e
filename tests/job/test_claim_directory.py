"""The output directory of a job, whatever happens while it is taken: it can always be used again, and never by two."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import counterpoint.job.reading.run_state
import counterpoint.job.write_job
from counterpoint.job.claim_directory import NothingLeft, check_directory, claim_directory
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load
from counterpoint.job.directory import JOB_FILE
from counterpoint.job.write_job import write_job
from counterpoint.orchestrator.step.checkpoint import StepCheckpoint, identity_of, write_checkpoint
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import write_atomically


@pytest.mark.parametrize("written_before", range(5))
def test_a_job_that_could_not_write_its_files_leaves_a_directory_one_can_use(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, written_before: int
) -> None:
    config = load(JobConfig, job_file, [])
    written: list[Path] = []

    def fill_the_disk(path: Path, *buffers: Any) -> None:
        if len(written) == written_before:
            path.with_name(f".{path.name}.1-abcd.partial").touch()  # what a SIGKILL leaves
            raise OSError("no space left on device")
        written.append(path)
        write_atomically(path, *buffers)

    with monkeypatch.context() as patched:
        patched.setattr(counterpoint.job.write_job, "write_atomically", fill_the_disk)
        with claim_directory(config.output_dir, fresh=False), pytest.raises(OSError, match="no space left"):
            write_job(config, job_file.read_bytes())
    for again, fresh in ((config, True), (config.model_copy(update={"resume": True}), False)):
        check_directory(again, fresh)
    with claim_directory(config.output_dir, fresh=True):
        write_job(config, job_file.read_bytes())


def test_a_directory_that_another_job_filled_meanwhile_is_not_mixed(job_file: Path) -> None:
    """Between the first look and the claim a model may be built for minutes."""
    config = load(JobConfig, job_file, [])
    check_directory(config, fresh=False)
    with claim_directory(config.output_dir, fresh=False):
        write_job(config, job_file.read_bytes())
    with pytest.raises(UserError, match="holds a job already"), claim_directory(config.output_dir, fresh=False):
        check_directory(config, fresh=False)


def test_a_run_goes_on_with_its_seed_and_environments_only(job_file: Path) -> None:
    """Which the orchestrator itself would refuse, but only once vLLM and the trainer have started."""
    config = load(JobConfig, job_file, ["--resume", "true"])
    with claim_directory(config.output_dir, fresh=False):
        write_job(config, job_file.read_bytes())
    write_checkpoint(
        config.orchestrator.run_dir, StepCheckpoint(3, identity_of(config.orchestrator), {}, {}, []), keep=1
    )
    check_directory(config, fresh=False)
    for flags, said in (
        (["--seed", "7"], "seed = 7 differs from 0"),
        (["--orchestrator.environments", '[{"name": "reverse", "kind": "guess-number"}]'], "environments = "),
    ):
        changed = load(JobConfig, job_file, ["--resume", "true", *flags])
        with pytest.raises(UserError, match=said):
            check_directory(changed, fresh=False)
    check_directory(load(JobConfig, job_file, ["--resume", "true", "--orchestrator.steps", "99"]), fresh=False)


def test_a_run_in_the_middle_of_its_work_is_not_resumed_with_fewer_steps_than_it_has(job_file: Path) -> None:
    """An evaluation that was interrupted after the last step asked for would wait for servers, which are not started."""
    config = load(JobConfig, job_file, ["--resume", "true"])
    with claim_directory(config.output_dir, fresh=False):
        write_job(config, job_file.read_bytes())
    write_checkpoint(
        config.orchestrator.run_dir, StepCheckpoint(18, identity_of(config.orchestrator), {}, {}, []), keep=1
    )
    fewer = load(JobConfig, job_file, ["--resume", "true", "--orchestrator.steps", "12"])
    with pytest.raises(UserError, match=r"run 'test' has 18 steps .*steps = 12 .*orchestrator"):
        check_directory(fewer, fresh=False)
    check_directory(load(JobConfig, job_file, ["--resume", "true", "--orchestrator.steps", "18"]), fresh=False)
    evicted = config.orchestrator.run_dir / "control" / "evicted.txt"
    evicted.parent.mkdir(parents=True, exist_ok=True)
    evicted.write_text("the loss is not finite")
    check_directory(fewer.model_copy(update={"stay": True}), fresh=False)  # it does not go on


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"runs": 3}, "runs: expected a list, found 3"),
        ({"runs": [{"run_id": [3], "steps": 20}]}, r"runs\[0\].run_id: expected a valid string, found \[3\]"),
        ({"orchestrator": None}, "expected the job's run as orchestrator"),
    ],
)
def test_a_damaged_job_is_not_resumed(job_file: Path, changes: dict[str, object], said: str) -> None:
    config = load(JobConfig, job_file, ["--resume", "true"])
    with claim_directory(config.output_dir, fresh=False):
        write_job(config, job_file.read_bytes())
    path = config.output_dir / JOB_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=f"job.json is damaged: {said}.*--fresh starts anew"):
        check_directory(config, fresh=False)


@pytest.mark.parametrize("stay", [False, True])
def test_a_resume_of_evicted_runs_alone_is_refused_with_what_to_remove(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, stay: bool
) -> None:
    """Else servers and trainer would start for nothing."""
    runs = 'runs=[{run_id="a", steps=4}, {run_id="b", steps=4}]'
    values = tomllib.loads(job_file.read_text()) | tomllib.loads(runs)
    values["orchestrator"] |= {"training": {"lora": {"rank": 2}}}
    values["orchestrator"].pop("steps", None)
    values["inference"] = values.get("inference", {}) | {"lora": {}}
    job_file.write_text(tomli_w.dumps(values | {"stay": stay}))
    config = load(JobConfig, job_file, ["--resume", "true"])
    with claim_directory(config.output_dir, fresh=False):
        write_job(config, job_file.read_bytes())
    files = [run.run_dir / "control" / "evicted.txt" for run in config.every_run]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("the loss is not finite")
        if stay or file is not files[-1]:
            check_directory(config, fresh=False)  # others can go on
    if not stay:
        with pytest.raises(NothingLeft, match=r"run 'a' was evicted: .*; run 'b' was") as refused:
            check_directory(config, fresh=False)
        assert str(files[0]) in str(refused.value)
        assert refused.value.code == 3
        with monkeypatch.context() as patched:  # a run that has all its steps is no reason to refuse
            patched.setattr(counterpoint.job.reading.run_state, "is_finished", lambda run: True)
            check_directory(config, fresh=False)
    files[0].unlink()
    check_directory(config, fresh=False)
