"""The witness of a chaos job has every batch, also one that is committed, trained and deleted between two of its looks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perf.chaos.batch_copies import keep_copy
from perf.chaos.disk import digest, json_lines
from perf.chaos.job import settings
from perf.chaos.witness import COMMITTED, Witness

DELETE = """
import shutil, sys
from pathlib import Path
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.workers.load import load_environment

kept, abandoned = map(Path, sys.argv[1:3])
for text in sys.argv[3:]:
    load_environment(EnvironmentConfig.model_validate_json(text))
kept.unlink()
kept.unlink(missing_ok=True)
shutil.rmtree(abandoned)
"""
"""An orchestrator, as far as its tasks and its batches go: it deletes a durable one, and the directory of one never committed."""


def commit(job: Path, step: int) -> Path:
    """A committed step with a batch; returns the batch's path."""
    for directory in (job / "run_one" / "rollouts" / f"step_{step}", job / "run_one" / "checkpoints" / f"step_{step}"):
        directory.mkdir(parents=True)
        (directory / "STABLE").touch()
    batch = job / "run_one" / "rollouts" / f"step_{step}" / "batch.bin"
    batch.write_bytes(b"batch %d" % step)
    return batch


def test_batches_deleted_between_two_looks_are_seen(tmp_path: Path) -> None:
    job, notes = tmp_path / "job", tmp_path / "notes"
    witness = Witness(job, notes)
    batches = [commit(job, step) for step in (1, 2, 3, 4)]
    digests = [digest(batch) for batch in batches]
    for batch in batches[:2]:
        keep_copy(notes, batch, -1)
        batch.unlink()
    keep_copy(notes, os.fsencode(batches[2]), -1)  # its orchestrator is killed before it deletes it
    keep_copy(notes, tmp_path / "batch.bin.txt", -1)
    witness.look()
    keep_copy(notes, batches[3], -1)  # which the witness has seen before
    assert [(line["step"], line["batch"]) for line in json_lines(notes / COMMITTED)] == list(enumerate(digests, 1))
    assert [digest(Witness.copy_of(notes, "one", step)) for step in (1, 2, 3, 4)] == digests


def test_a_look_that_finds_fewer_checkpoints_does_not_go_back(tmp_path: Path) -> None:
    """Newer ones may have replaced those that its listing had."""
    job = tmp_path / "job"
    witness = Witness(job, tmp_path / "notes")
    commit(job, 1)
    witness.look()
    shutil.rmtree(job / "run_one" / "checkpoints")
    witness.look()
    assert witness.committed == {"one": 1}
    commit(job, 2)
    witness.look()
    assert [line["step"] for line in json_lines(tmp_path / "notes" / COMMITTED)] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("position", [0, 2])
def test_the_tasks_of_the_job_keep_what_their_process_deletes(tmp_path: Path, position: int) -> None:
    job, notes = tmp_path / "job", tmp_path / "notes"
    configured = settings(job, notes)
    run = configured["orchestrator"] | configured["runs"][position]
    durable, abandoned = commit(job, 1), commit(job, 2)
    expected = digest(durable)
    environments = [json.dumps(environment) for environment in run["environments"]]
    command = [sys.executable, "-c", DELETE, str(durable), str(abandoned.parent), *environments]
    subprocess.run(command, check=True)
    assert not durable.exists()
    assert digest(Witness.copy_of(notes, "one", 1)) == expected
    assert not Witness.copy_of(notes, "one", 2).exists()
