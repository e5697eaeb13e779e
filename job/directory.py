"""What a job's directory says of itself, read by whoever comes to it from outside: `status`, `stop`, and a run that joins.

`job/output.py` writes `job.json`, `cli/run.py` writes `processes.json`; the runs' directories and locks are the orchestrators'.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson

from job.errors import UserError
from trainer.runs.control_files import MAX_CONFIG_BYTES
from transport.config import IDENTIFIER_PATTERN
from transport.files.lock import Holder, holder_of
from transport.files.untrusted import UntrustedFileError, read_toml

JOB_FILE = "job.json"
JOB_LOCK = "job.lock"
PROCESSES_FILE = "processes.json"


def is_running(directory: Path) -> bool:
    """Whether `counterpoint run` is at work in the directory."""
    return holder_of(directory / JOB_LOCK) is not None


def orchestrator_of(directory: Path, run_id: str) -> Holder | None:
    """The run's orchestrator, whoever started it; None when it does not run."""
    return holder_of(lock_file_of(directory, run_id))


def lock_file_of(directory: Path, run_id: str) -> Path:
    """What the run's orchestrator has locked while it runs."""
    return directory / f"run_{run_id}" / "orchestrator.lock"


def own_runs(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of a job as its `job.json` has them, those of guests not among them. As `JobConfig.every_run`."""
    if job.get("runs") or (job.get("stay") and not job["orchestrator"]["environments"]):
        return list(job["runs"])
    return [job["orchestrator"]]


def run_ids_in(directory: Path) -> list[str]:
    """The runs that have a directory here."""
    named = ((path.name.removeprefix("run_"), path) for path in directory.glob("run_*"))
    return sorted(run_id for run_id, path in named if re.fullmatch(IDENTIFIER_PATTERN, run_id) and path.is_dir())


def living_runs(directory: Path) -> list[str]:
    """The runs whose orchestrators live, whoever started them."""
    return [run_id for run_id in run_ids_in(directory) if orchestrator_of(directory, run_id) is not None]


def steps_of(directory: Path, run_id: str) -> int | None:
    """How many steps the run is to have; None where that is not known."""
    steps = written_config(directory, run_id).get("steps")
    return steps if type(steps) is int else None


def written_config(directory: Path, run_id: str) -> dict[str, Any]:
    """The run's configuration as its orchestrator wrote it. Empty before it has, and for what is no configuration: that is for
    its trainer to refuse, and no reason to leave it, or the others, alone."""
    try:
        return read_toml(directory / f"run_{run_id}" / "control" / "orch.toml", MAX_CONFIG_BYTES)
    except (OSError, UntrustedFileError):
        return {}


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file. Raises `UserError` for one that is missing or damaged."""
    try:
        content = orjson.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path} is damaged: {error}; --fresh starts anew") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: expected an object, found {type(content).__name__}")
    return content
