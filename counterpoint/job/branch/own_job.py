"""The job of a branch in a directory of its own: as the job that it comes from was started, with the branch as its only run.

Servers take other ports, and the roles of one machine another socket. What that job keeps in its own directory, such as its
servers' secret, is made anew. Clients of its service, its fine-tuning and its other runs stay behind.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import tomli_w

from counterpoint.job.admin.ask import Refused
from counterpoint.job.branch.kept import StepNotKept
from counterpoint.job.config import SHARED, JobConfig
from counterpoint.job.derive import IDENTITY_FILE
from counterpoint.job.directory import JOB_FILE, read_json
from counterpoint.run.config import RunConfig
from counterpoint.transport.configuration.explain import validate
from counterpoint.transport.configuration.toml_file import Table

_POOL_OF_JOB = {"urls", "urls_file", "api_key_file", "identity_file"}
"""Keys of a run's view of the servers that follow from `[inference]` where the job starts them."""


def job_of_its_own(job: Path, config: RunConfig, trained: int, changes: Collection[str]) -> JobConfig:
    """Returns the job in `config.output_dir` of the branch `config`, whose trainer goes on from step `trained`.

    Raises `Refused` if one of the keys in `changes` is one that the job sets, `UserError` for a missing or damaged `job.json` of
    the other job, and `StepNotKept` if the trainer would begin with other weights.
    """
    origin = job / JOB_FILE
    given = read_json(origin, "restore it from a copy")
    trainer = given.get("trainer")
    model = trainer.get("model") if isinstance(trainer, dict) else None  # what the name at the top was then
    former = validate(JobConfig, given | {"model": model}, str(origin))
    if not trained and former.seed != config.seed:
        raise StepNotKept(
            f"run {config.run_id} would begin anew in a job of its own, and with other weights: those of seed = {former.seed} of "
            f"the job in {job} become those of seed = {config.seed}; go on from a checkpoint of the trainer, or leave --into out"
        )
    table = former.table() | {"orchestrator": config.table()}
    free = {"inference": {"port": 0}, "trainer": {"prometheus_port": 0}, "orchestrator": {"prometheus_port": 0}}
    sections = {name: _own(table[name], *shared) | free[name] for name, shared in SHARED.items()}
    servers, run = sections["inference"], sections["orchestrator"]
    of_job = {*SHARED["orchestrator"], *free["orchestrator"]}
    of_job |= {f"inference.{key}" for key in _POOL_OF_JOB if servers["replicas"]}
    if wrong := [key for key in changes if not of_job.isdisjoint((key, key.partition(".")[0]))]:
        raise Refused(
            f"{wrong[0]} is set by the job, and cannot be another in a branch with a job of its own; make the branch without it, "
            f"and edit {config.output_dir / 'job.toml'}"
        )
    if servers["replicas"]:
        run["inference"] = _own(run["inference"], *_POOL_OF_JOB)
    if former.inference.identity_file == former.trainer.output_dir / IDENTITY_FILE:
        del servers["identity_file"]
    if former.serve is not None:
        sections["serve"] = table["serve"] | {"port": 0}
    shared = {"output_dir": str(config.output_dir), "seed": config.seed, "resume": False, "prometheus_port": 0}
    if former.transport.secret_key_file is None:  # so that the address, if there is one, is of this machine
        shared["transport"] = _own(table["transport"], "address")
    alone: Table = {"runs": [], "sft": None, "tinker": None, "stay": False}
    return validate(JobConfig, {**table, **shared, **sections, **alone}, str(origin))


def file_of(job: JobConfig) -> bytes:
    """Returns the job's TOML file, in which values that the sections share stand once, so that a flag may change them."""
    table = job.table()
    return tomli_w.dumps(table | {name: _own(table[name], *shared) for name, shared in SHARED.items()}).encode()


def _own(section: Table, *others: str) -> Table:
    return {key: value for key, value in section.items() if key not in others}
