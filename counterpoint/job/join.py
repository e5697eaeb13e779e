"""The values that a run takes from the job that it joins (`counterpoint orchestrator FILE --join DIRECTORY`), and its checks.

The job's `job.json` has the addresses and the limits of its trainer and servers. The run's own file holds only the run's own
values, as an entry of `[[runs]]` does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from counterpoint.environments.import_path import LIBRARY_KEYS, not_allowed
from counterpoint.job.check import import_paths
from counterpoint.job.claim_directory import NothingLeft
from counterpoint.job.derive import check_fits
from counterpoint.job.directory import JOB_FILE, is_running, own_steps, read_json
from counterpoint.job.reading.run_state import eviction_of
from counterpoint.job.sections import ServersConfig
from counterpoint.run.config import RunConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport.configuration.explain import validate
from counterpoint.transport.errors import UserError

FROM_THE_JOB = ("model", "served_model", "transport", "inference")
"""Keys that a run takes from its job, besides the directory, unless its own file sets them: from another machine, paths and
addresses of the same model, trainer and servers may differ."""

_IMPORT_PATH = re.compile(r"[\w.-]+:[\w.]+")


def values_of_job(directory: str) -> dict[str, Any]:
    """Returns the job's values for a run; the run's own file replaces them. Raises `UserError` if there is no job."""
    shared = _job(Path(directory))["orchestrator"]
    known = {key: shared[key] for key in FROM_THE_JOB if key in shared}
    return {"output_dir": str(Path(directory).absolute())} | known


def is_local(directory: Path) -> bool:
    """Returns whether the job's roles run on this machine, and find what a run names by its path. Raises as `values_of_job`."""
    return bool(_job(directory).get("backend", "local") == "local")


def allowed_imports(directory: Path) -> set[str]:
    """Returns the import paths that a guest of the job may name: `trainer.allowed_imports`, and whatever the job's own runs name.

    Raises as `values_of_job`.
    """
    job = _job(directory)
    return named_imports({"id": job["trainer"].get("allowed_imports"), "own": [job["orchestrator"], job.get("runs")]})


def named_imports(value: object, is_id: bool = False) -> set[str]:
    """Returns the texts in a configuration's tables that are import paths, or by which the verifiers library imports."""
    match value:
        case dict():
            inner = [(each, is_id or str(key).rpartition(".")[2] in LIBRARY_KEYS) for key, each in value.items()]
        case list():
            inner = [(each, is_id) for each in value]
        case str() if is_id or _IMPORT_PATH.fullmatch(value):
            return {value}
        case _:
            return set()
    return set[str]().union(*(named_imports(each, below) for each, below in inner))


def check_allowed(run: RunConfig, directory: Path) -> None:
    """Raises `UserError` for a kind that a guest of the job may not name. Those in arguments are checked when it is loaded."""
    allowed = allowed_imports(directory)
    for path in import_paths(run):
        if path not in allowed:
            raise UserError(not_allowed(path, "kind"))


def check_joins(run: RunConfig, directory: Path) -> None:
    """Raises `UserError` unless the job runs and can take the run."""
    job = _job(directory)
    if run.output_dir != directory.absolute():
        raise UserError(
            f"output_dir = {str(run.output_dir)!r} is not the directory of the job to join, {directory}; leave it out"
        )
    if not is_running(directory):
        raise UserError(f"no job runs in {directory}: start it with `counterpoint run`, and then join")
    check_allowed(run, directory)
    own = own_steps(directory) or {}
    if run.run_id in own and not run.resume:
        raise UserError(
            f"run_id = {run.run_id!r} is one of the job's own runs ({', '.join(own)}): choose another, or, once that run has "
            "ended, go on with it by --resume"
        )
    servers = validate(ServersConfig, job["inference"], f"{directory / JOB_FILE}, inference")
    trainer = validate(TrainerConfig, job["trainer"], f"{directory / JOB_FILE}, trainer")
    if servers.lora is None:
        raise UserError(
            f"the job in {directory} trains all weights of its model, so it takes no second run. Only a job whose runs train "
            "adapters can be joined"
        )
    try:
        check_fits("", run, servers, trainer)
    except ValueError as error:
        raise UserError(f"the job in {directory} cannot take this run: {error}") from None


def check_goes_on(run: RunConfig) -> None:
    """Raises `NothingLeft` for a run that is to go on and is evicted."""
    if run.resume and (eviction := eviction_of(run)) is not None:
        raise NothingLeft(eviction)


def _job(directory: Path) -> dict[str, Any]:
    if not (directory / JOB_FILE).exists():
        raise UserError(f"--join {directory}: there is no job ({JOB_FILE} is missing)")
    job = read_json(directory / JOB_FILE)
    for section in ("inference", "trainer", "orchestrator"):
        if not isinstance(job.get(section), dict):
            raise UserError(f"{directory / JOB_FILE} lacks {section}: did another version of counterpoint write it?")
    return job
