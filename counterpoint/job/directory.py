"""The layout of a job's directory, and reading it from outside, as `status`, `stop` and a run that joins do.

`counterpoint/job/claim_directory.py` locks the directory, `counterpoint/job/write_job.py` writes `job.json`, and
`counterpoint/job/processes_file.py` writes `processes.json`. The runs' directories and locks belong to their orchestrators.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from counterpoint.run.trained import LARGEST_STEP
from counterpoint.trainer.runs.control_files import MAX_CONFIG_BYTES
from counterpoint.transport.config import IDENTIFIER_PATTERN, Identifier
from counterpoint.transport.errors import UserError
from counterpoint.transport.exact_json import JsonError, loads
from counterpoint.transport.files.lock import LockHolder, holder_of
from counterpoint.transport.files.untrusted import UntrustedFileError, read_toml
from counterpoint.transport.files.wrong_types import first_wrong

JOB_FILE = "job.json"
"""The job as resolved. It marks a directory as a job's."""

MAX_JOB_BYTES = 2**26
"""The size of `job.json`, and of `processes.json`, that the page reads."""

JOB_LOCK = "job.lock"
"""The lock that `counterpoint run` holds."""

RESTORE = "restore it from a copy; --fresh starts anew"
"""What to do about a damaged `job.json`."""

Content = TypeVar("Content", bound=BaseModel)


class _Trainer(BaseModel):
    """What is read of the trainer."""

    max_runs: int = Field(ge=1)


class _WithTrainer(BaseModel):
    """What is read of `job.json` for those who would join."""

    trainer: _Trainer


class _Run(BaseModel):
    """What is read of a run."""

    run_id: Identifier
    steps: int = Field(ge=1, le=LARGEST_STEP)
    environments: list[Any] = Field(default_factory=list)


class _Job(BaseModel):
    """What is read of `job.json`."""

    orchestrator: _Run | None = None
    runs: list[_Run] = Field(default_factory=list)
    stay: bool = False

    @model_validator(mode="after")
    def _has_runs(self) -> _Job:
        if self.orchestrator is None and not self.runs:
            raise ValueError("expected the job's run as orchestrator, or several as runs")
        return self

    @property
    def own(self) -> list[_Run]:
        """The job's own runs, without guests."""
        run = self.orchestrator
        return self.runs if run is None or not is_only_run(self.runs, self.stay, run.environments) else [run]


def is_directory(path: Path) -> bool:
    """Returns whether there is a directory that may be looked at, and no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def control_directory(directory: Path) -> Path:
    """Returns where `cluster` keeps what it needs to run the job: its state, and the endpoints of its keepers."""
    return directory / "control"


def is_running(directory: Path) -> bool:
    """Returns whether a `counterpoint run` holds the directory's lock."""
    return holder_of(directory / JOB_LOCK) is not None


def orchestrator_of(directory: Path, run_id: str) -> LockHolder | None:
    """Returns the process that holds the run's lock, of the job or of a guest; None if there is none."""
    return holder_of(lock_file_of(directory, run_id))


def lock_file_of(directory: Path, run_id: str) -> Path:
    """Returns the path of the lock that a run's orchestrator holds."""
    return directory / f"run_{run_id}" / "orchestrator.lock"


def is_only_run(runs: object, stay: object, environments: object) -> bool:
    """Returns whether `[orchestrator]` with these environments is the job's only own run, and not what `runs` have in common.

    A job that stays and has neither is for guests alone.
    """
    return not runs and not (stay and not environments)


def own_runs(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the tables of the job's own runs, without guests, from the content of `job.json`.

    Raises `KeyError`, `TypeError` or `AttributeError` for damaged content.
    """
    runs, run = job.get("runs"), job.get("orchestrator") or {}
    return [run] if is_only_run(runs, job.get("stay"), run.get("environments")) else list(job["runs"])


def own_steps(directory: Path) -> dict[str, int] | None:
    """Returns the configured steps of the job's own runs by run id.

    None without `job.json`, if the roles were started one by one. Raises `UserError` for a damaged file.
    """
    if not (directory / JOB_FILE).exists():
        return None
    return {run.run_id: run.steps for run in read_as(_Job, directory / JOB_FILE).own}


def runs_at_once(directory: Path) -> int:
    """Returns how many runs the job's trainer takes at once. Raises `UserError` for a missing or damaged `job.json`."""
    return read_as(_WithTrainer, directory / JOB_FILE).trainer.max_runs


def run_ids_in(directory: Path) -> list[str]:
    """Returns the ids of the runs that have a directory here, sorted."""
    named = ((path.name.removeprefix("run_"), path) for path in directory.glob("run_*"))
    return sorted(run_id for run_id, path in named if re.fullmatch(IDENTIFIER_PATTERN, run_id) and path.is_dir())


def living_runs(directory: Path) -> list[str]:
    """Returns the ids of the runs whose orchestrators are alive, guests included."""
    return [run_id for run_id in run_ids_in(directory) if orchestrator_of(directory, run_id) is not None]


def steps_of(directory: Path, run_id: str) -> int | None:
    """Returns the run's configured number of steps; None if unknown."""
    return as_steps(written_config(directory, run_id).get("steps"))


def as_steps(value: object) -> int | None:
    """Returns a number of steps that anybody may have written; None for what no run may have."""
    return value if type(value) is int and 0 < value <= LARGEST_STEP else None


def written_config(directory: Path, run_id: str) -> dict[str, Any]:
    """Returns the run's configuration as its orchestrator wrote it; empty if it is missing or not a configuration.

    The trainer refuses an invalid configuration; a reader from outside goes on without it.
    """
    try:
        return read_toml(directory / f"run_{run_id}" / "control" / "orch.toml", MAX_CONFIG_BYTES)
    except (OSError, UntrustedFileError):
        return {}


def read_as(model: type[Content], path: Path, advice: str = RESTORE) -> Content:
    """Returns what the file holds. Raises as `read_json`, also for a key that is missing or has a value of a wrong type."""
    try:
        return model.model_validate(read_json(path, advice))
    except ValidationError as error:
        raise UserError(f"{path} is damaged: {first_wrong(error)}; {advice}") from None


def read_json(path: Path, advice: str = RESTORE) -> dict[str, Any]:
    """Returns the object in the file. Raises `UserError`, with `advice`, for a file that is missing or damaged."""
    try:
        content = loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except JsonError as error:
        raise UserError(f"{path} is damaged: {error}; {advice}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: expected an object, found {type(content).__name__}; {advice}")
    return content
