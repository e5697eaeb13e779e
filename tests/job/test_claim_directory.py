"""The output directory of a job, whatever happens while it is taken: it can always be used again, and never by two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import job.write_job
from job.claim_directory import check_directory, claim_directory
from job.config import JobConfig
from job.configuration.load import load
from job.directory import JOB_FILE
from job.write_job import write_job
from orchestrator.step.checkpoint import Checkpoint, identity_of, write_checkpoint
from transport.errors import UserError
from transport.files.atomic import write_atomically


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
        patched.setattr(job.write_job, "write_atomically", fill_the_disk)
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
    write_checkpoint(config.orchestrator.run_dir, Checkpoint(3, identity_of(config.orchestrator), {}, {}, []), keep=1)
    check_directory(config, fresh=False)
    for flags, said in (
        (["--seed", "7"], "seed = 7 differs from 0"),
        (["--orchestrator.environments", '[{"name": "reverse", "kind": "guess-number"}]'], "environments = "),
    ):
        changed = load(JobConfig, job_file, ["--resume", "true", *flags])
        with pytest.raises(UserError, match=said):
            check_directory(changed, fresh=False)
    check_directory(load(JobConfig, job_file, ["--resume", "true", "--orchestrator.steps", "99"]), fresh=False)


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
