"""What commands share that train or compute a recorded step again: its run, trainer and a place to work."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import ValidationError

from counterpoint.cli.arguments.job import job_of
from counterpoint.job.config import JobConfig
from counterpoint.job.directory import JOB_FILE, MAX_JOB_BYTES
from counterpoint.job.reading.rollouts.rollout_records import find_run
from counterpoint.job.resolve_model import resolve_model
from counterpoint.job.workers import environment_of
from counterpoint.job.write_job import ROLES
from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json, read_toml
from counterpoint.transport.process.extras import TRAINING, require

_MAX_ROLE_BYTES = 2**20


def run_of(given: argparse.Namespace) -> tuple[Path, str]:
    """Returns the job's directory and the run's id, by the directory of either. Raises `UserError`."""
    job = job_of(given)
    if job.name.startswith("run_") and (job / "control").is_dir():
        return job.absolute().parent, job.name.removeprefix("run_")
    return job, find_run(job, given.run)


def trainer_of(job: Path) -> TrainerConfig:
    """Returns the configuration of a job's trainer, and divides the machine's cores as the job does.

    Raises `UserError` if the job has none, or torch is not installed.
    """
    require("training a step again", *TRAINING)
    file = job / ROLES / "trainer.toml"
    try:
        config = TrainerConfig.model_validate(read_toml(file, _MAX_ROLE_BYTES))
        if (job / JOB_FILE).exists():
            given = read_json(job / JOB_FILE, MAX_JOB_BYTES) | {"model": config.model}  # its sections have it resolved
            whole = JobConfig.model_validate(given)
            os.environ |= environment_of(whole, "trainer") | dict(os.environ)
    except FileNotFoundError:
        raise UserError(
            f"{file} is not there: a step is trained again by the configuration of the job's trainer; copy the file that the "
            "trainer was started with to that place"
        ) from None
    except (UntrustedFileError, ValidationError, OSError) as error:
        raise UserError(f"the configuration of the job's trainer cannot be used: {error}") from None
    return config.model_copy(update={"model": str(resolve_model(config.model))})


@contextmanager
def workplace(quiet: bool) -> Iterator[Path]:
    """Makes an empty directory for the block, below TMPDIR. Logs of progress go to standard error unless `quiet`."""
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, format="%(message)s")
    for name in ("counterpoint.trainer.runs", "counterpoint.trainer.model"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with TemporaryDirectory(prefix="counterpoint-again-") as directory:
        yield Path(directory)
