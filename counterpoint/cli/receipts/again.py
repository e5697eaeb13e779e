"""What commands share that train or compute a recorded step again: its trainer and a place to work."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import ValidationError

from counterpoint.job.config import JobConfig
from counterpoint.job.directory import JOB_FILE, MAX_JOB_BYTES
from counterpoint.job.resolve_model import resolve_model
from counterpoint.job.workers import environment_of
from counterpoint.job.write_job import ROLES
from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json, read_toml
from counterpoint.transport.process.extras import TRAINING, require
from counterpoint.transport.process.imports import trainer_imports

_MAX_ROLE_BYTES = 2**20
_LOGGERS_OF_RUNS = ("counterpoint.trainer.runs", "counterpoint.trainer.model")


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
def again(given: argparse.Namespace, job: Path, run_id: str, what: str) -> Iterator[tuple[TrainerConfig, Path]]:
    """Gives the block the trainer's configuration, and an empty directory below TMPDIR to work in; it may import the trainer.

    Logs of progress go to standard error, unless the result is JSON. Raises `UserError`: that the step cannot be `what` again,
    where the block raises `ValueError` or `OSError`, or why there is no trainer.
    """
    config = trainer_of(job)
    logging.basicConfig(level=logging.WARNING if given.json else logging.INFO, format="%(message)s")
    with trainer_imports():
        import_module("counterpoint.trainer.again.learner")
    with _without_progress_of_runs(), TemporaryDirectory(prefix="counterpoint-again-") as directory:
        try:
            yield config, Path(directory)
        except (ValueError, OSError) as error:
            raise UserError(f"step {given.step} of run {run_id} cannot be {what} again: {error}") from None


@contextmanager
def _without_progress_of_runs() -> Iterator[None]:
    levels = {logger: logger.level for logger in map(logging.getLogger, _LOGGERS_OF_RUNS)}
    for logger in levels:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
