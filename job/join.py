"""What a run has from the job that it joins: `counterpoint orchestrator FILE --join DIRECTORY`.

The job's `job.json` says where its trainer and its servers are, and what they can take. The run's own file then holds what is
the run's own, as an entry of `[[runs]]` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from job.configuration.load import validate
from job.derive import check_run
from job.directory import JOB_FILE, is_running, own_runs, read_json
from job.errors import UserError
from job.sections import ServersConfig
from run.config import RunConfig
from trainer.config import TrainerConfig

FROM_THE_JOB = ("model", "served_model", "transport", "inference")
"""Keys that a run has from its job, besides the directory, unless its own file sets them: from another machine the way to the
same model, trainer and servers may be another."""


def values_of_job(directory: str) -> dict[str, Any]:
    """What lies below the values of the run's own file. Raises `UserError` where there is no job."""
    shared = _job(Path(directory))["orchestrator"]
    known = {key: shared[key] for key in FROM_THE_JOB if key in shared}
    return {"output_dir": str(Path(directory).absolute())} | known


def check_joins(run: RunConfig, directory: Path) -> None:
    """Raises `UserError` unless the job runs and can take the run."""
    job = _job(directory)
    if run.output_dir != directory.absolute():
        raise UserError(
            f"output_dir = {str(run.output_dir)!r} is not the directory of the job to join, {directory}; leave it out"
        )
    if not is_running(directory):
        raise UserError(f"no job runs in {directory}: start it with `counterpoint run`, and then join")
    own = [run["run_id"] for run in own_runs(job)]
    if run.run_id in own and not run.resume:
        raise UserError(
            f"run_id = {run.run_id!r} is one of the job's own runs ({', '.join(own)}): choose another, or go on with that one, "
            "once it has ended, by --resume"
        )
    servers = validate(ServersConfig, job["inference"], f"{directory / JOB_FILE}, inference")
    trainer = validate(TrainerConfig, job["trainer"], f"{directory / JOB_FILE}, trainer")
    if servers.lora is None:
        raise UserError(
            f"the job in {directory} trains all weights of its model, which leaves room for one run only. Runs that train "
            "adapters can be joined"
        )
    try:
        check_run("", run, servers, trainer)
    except ValueError as error:
        raise UserError(f"the job in {directory} cannot take this run: {error}") from None


def _job(directory: Path) -> dict[str, Any]:
    if not (directory / JOB_FILE).exists():
        raise UserError(f"--join {directory}: there is no job ({JOB_FILE} is missing)")
    job = read_json(directory / JOB_FILE)
    for section in ("inference", "trainer", "orchestrator"):
        if not isinstance(job.get(section), dict):
            raise UserError(f"{directory / JOB_FILE} lacks {section}: did another version of counterpoint write it?")
    return job
