"""The output directory of a job, whatever happens while it is taken: it can always be used again, and never by two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cli.output
from cli.errors import UserError
from cli.job import JobConfig
from cli.load import load
from cli.output import check_output, claim, write_job
from transport.atomic import write_atomically


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
        patched.setattr(cli.output, "write_atomically", fill_the_disk)
        with claim(config.output_dir, fresh=False), pytest.raises(OSError, match="no space left"):
            write_job(config, job_file.read_bytes())
    for again, fresh in ((config, True), (config.model_copy(update={"resume": True}), False)):
        check_output(again, fresh)
    with claim(config.output_dir, fresh=True):
        write_job(config, job_file.read_bytes())


def test_a_directory_that_another_job_filled_meanwhile_is_not_mixed(job_file: Path) -> None:
    """Between the first look and the claim a model may be built for minutes."""
    config = load(JobConfig, job_file, [])
    check_output(config, fresh=False)
    with claim(config.output_dir, fresh=False):
        write_job(config, job_file.read_bytes())
    with pytest.raises(UserError, match="holds a job already"), claim(config.output_dir, fresh=False):
        check_output(config, fresh=False)
