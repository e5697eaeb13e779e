"""Checks what the file of an experiment names, before anything starts: its import paths, and the job that is to be started.

What is named by import path is loaded by a child process, as the trials will load it. The trainable's is
`python -m counterpoint.tune.check`.
"""

from __future__ import annotations

import json
import sys

from counterpoint.environments.describe_error import describe_error
from counterpoint.job.check import check_imports, check_job, load_in_child, own_answer
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import located
from counterpoint.job.configuration.named_files import check_beginning, check_run_files
from counterpoint.job.directory import JOB_FILE
from counterpoint.job.join import check_allowed, is_local
from counterpoint.transport.errors import UserError
from counterpoint.tune.file_experiment import FileExperiment
from counterpoint.tune.registry import load, search_path
from counterpoint.tune.trainable.functions import trainable_class


def check_experiment(experiment: FileExperiment, *, begins: bool) -> None:
    """Checks the job to start as `counterpoint run` does, the files that trials name, and loads what they will load.

    `begins`: whether no trial has begun.

    Raises `UserError` that names file and key; its subclass `Obstructed` if something that an environment needs does not answer.
    """
    config, file = experiment.config, experiment.file
    if config.executor == "runs":
        _check_job(experiment)
    try:
        if config.executor == "runs":
            if begins:
                experiment.check_domains()
            is_here = _is_here(experiment)
            for run in experiment.runs_that_load():
                if is_here:
                    check_run_files(run)
                if is_here and begins:
                    check_beginning(run.training)
                check_imports([run])
                if config.job is not None and config.job.join is not None:
                    check_allowed(run, config.job.join)
        elif config.executor == "local":  # on Ray, only its nodes may be able to load it
            load_in_child(
                f"{config.trainable}", "counterpoint.tune.check", [json.dumps([search_path(), config.trainable])]
            )
    except UserError as error:
        raise type(error)(f"{file}: {str(error).removeprefix(f'{file}: ')}") from None


def _is_here(experiment: FileExperiment) -> bool:
    """Whether the job of the trials finds on this machine what they name."""
    of = experiment.config.job
    if of is not None and of.join is not None:
        return is_local(of.join)
    return experiment.job().backend == "local"


def _check_job(experiment: FileExperiment) -> None:
    of = experiment.config.job
    if of is None or of.file is None:
        return
    job = experiment.job()
    try:
        check_job(job.model_copy(update={"resume": (job.output_dir / JOB_FILE).exists()}))
    except UserError as error:
        told = str(located(error, JobConfig, of.file, []))
        raise type(error)(told if told.startswith(f"{of.file}:") else f"{of.file}: {told}") from None


def main() -> int:
    """Runs the child, which loads a trainable. Its standard output is the error, if there is one."""
    sys.path[:], path = json.loads(sys.argv[1])
    with own_answer() as answer:
        try:
            trainable_class(load(path), path)
        except BaseException as error:  # noqa: BLE001 - importing the user's module may raise anything
            answer.write(f"trainable = {path!r}: {describe_error(error)}; no trial could be started")
            return UserError.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
