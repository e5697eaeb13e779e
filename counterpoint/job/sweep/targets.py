"""`SweepConfig`, the file of a sweep, and its targets: their configurations, directories and commands.

A target is one configuration: the values that all targets share, and those of one point of the grid
(`counterpoint/job/sweep/grid.py`). With `join` it is a run that joins a live job; without, it is a job of its own.
`counterpoint/job/sweep/worker.py` runs them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, field_validator, model_validator

from counterpoint.cluster.spec import Resources
from counterpoint.job.check import check_run
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import merge
from counterpoint.job.configuration.named_files import check_beginning, check_job_files, check_run_files
from counterpoint.job.directory import JOB_LOCK, is_running, orchestrator_of, run_ids_in
from counterpoint.job.join import check_joins, is_local, values_of_job
from counterpoint.job.resolve_model import check_model
from counterpoint.job.sweep.grid import Point, describe_values, expand, with_value_at
from counterpoint.run.config import RunConfig
from counterpoint.transport.config import Config
from counterpoint.transport.configuration.explain import Layer, Model, validate
from counterpoint.transport.configuration.schema import ITEM, keys_of, nearest
from counterpoint.transport.configuration.toml_file import Table, read_toml
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.lock import holder_of

LONGEST_RUN_ID = 64
LONGEST_NAME = 24
"""The longest name of a sweep, in characters; the rest of a run's id is the target's."""

RESERVED = ("run_id", "output_dir", "resume", "orchestrator.resume", "trainer.resume")
"""Keys that the sweep sets, and no target may."""


class SweepConfig(Config):
    """A sweep: targets that any number of workers, on any machines, share. Each target is run by exactly one of them."""

    name: Annotated[str, StringConstraints(pattern=rf"^[A-Za-z0-9][A-Za-z0-9_.-]{{0,{LONGEST_NAME - 1}}}$")]
    """The sweep's name, part of the runs' ids. A sweep with the same name goes on where it was; a new name starts anew."""

    root: str
    """The storage of the targets' states, in a folder with the sweep's name: a directory, `file://`, `s3://` or `gs://`, the same
    for all workers."""

    join: Path | None = None
    """The directory of a live job: each target is a run that joins it, as by `counterpoint orchestrator FILE --join`. Unset: each
    target is a job of its own, as by `counterpoint run FILE`, below the `output_dir` that `file` or `[base]` gives."""

    file: Path | None = None
    """The values that all targets share: a run's file with `join`, else a job's."""

    base: dict[str, Any] = {}
    """Further values that all targets share; they replace those of `file`."""

    grid: dict[str, Any] = {}
    """Lists of values by keys of a run, or of a job: every combination is a target. `environments.0.ratio` reaches into
    a list."""

    zip: list[dict[str, Any]] = []
    """Lists of one length whose values go together, as one dimension of the grid."""

    targets: list[dict[str, Any]] = []
    """Instead of a grid: the values of each target."""

    max_attempts: int | None = Field(default=3, ge=1)
    """How often all workers together try a target before it stays FAILED. Interrupted attempts do not count."""

    heartbeat_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds between two heartbeats of a worker."""

    lease_seconds: float = Field(default=90.0, gt=0, allow_inf_nan=False)
    """Seconds without a heartbeat after which another worker may claim the target. At least twice `heartbeat_seconds`."""

    workers: int | None = Field(default=None, ge=1)
    """How many workers to submit as a job of roles, and to wait for. Unset: the command is a worker itself."""

    backend: str = "local"
    """The place where the submitted workers run: `local`, `ray`, or the import path of a class."""

    resources: Resources = Resources()
    """What each submitted worker needs."""

    prometheus_port: int = Field(default=0, ge=0, le=65535)
    """Loopback port of a worker's metrics; 0 takes a free one, which its log names. Submitted workers cannot share another."""

    @field_validator("root")
    @classmethod
    def _is_shared(cls, root: str) -> str:
        if root.startswith("memory://"):
            raise ValueError("workers cannot share the memory of one process: name a directory, or s3:// or gs://")
        return root

    @model_validator(mode="after")
    def _ports_differ(self) -> SweepConfig:
        if self.prometheus_port and self.workers is not None:
            raise ValueError(
                f"prometheus_port = {self.prometheus_port} cannot be that of each of workers = {self.workers}; leave it out, and "
                "each takes a free one"
            )
        return self

    @model_validator(mode="after")
    def _terms_can_be_kept(self) -> SweepConfig:
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"lease_seconds = {self.lease_seconds:g} is below twice heartbeat_seconds = {self.heartbeat_seconds:g}, so that "
                "one late heartbeat would lose a target; raise it, or lower heartbeat_seconds"
            )
        return self

    @property
    def store(self) -> str:
        """The root of the sweep with this name, for the package `sweep`."""
        return f"{self.root.rstrip('/')}/{self.name}"


@dataclass(frozen=True)
class Target:
    """One target, not yet validated."""

    target_id: str
    values: dict[str, Any]
    """The values that it sets, by dotted path."""
    settings: Table
    """The whole content of its file."""
    output_dir: Path
    """The directory of the job that it is, or joins."""
    run_id: str | None
    """The run's id; None for a job."""
    joins: Path | None
    """The directory of the job to join; None for a job."""
    origin: str
    """The sweep's file and the target's id, for error messages."""
    shared: str = ""
    """The file whose values all targets share, for error messages; the sweep's without one."""
    above: tuple[Layer, ...] = ()
    """The place where values are set that replace those of `shared`."""

    @property
    def output(self) -> Path:
        """The directory of its run, or of its job."""
        return self.output_dir if self.run_id is None else self.output_dir / f"run_{self.run_id}"

    def missing_output(self) -> str | None:
        """Returns, for a person, that the directory of its output is not there, although it reads SUCCESS; None if it is."""
        if self.output.is_dir():
            return None
        return (
            f"{self.target_id} reads SUCCESS, but the directory of its output, {self.output}, is not here: it was deleted, or is "
            "another machine's; move its record away to run it afresh"
        )

    @property
    def file(self) -> Path:
        """The file of its process: beside the other roles' files, or beside the job's directory."""
        if self.run_id is not None:
            return self.output_dir / "roles" / f"orchestrator_{self.run_id}.toml"
        return self.output_dir.with_name(f"{self.output_dir.name}.toml")

    @property
    def log_file(self) -> Path:
        """The file of its process's output."""
        if self.run_id is not None:
            return self.output_dir / f"orchestrator_{self.run_id}.log"
        return self.output_dir.with_name(f"{self.output_dir.name}.log")

    @property
    def command(self) -> list[str]:
        """The command of its process, which resumes what earlier processes have done."""
        role = ["run"] if self.run_id is None else ["orchestrator"]
        join = [] if self.joins is None else ["--join", str(self.joins)]
        return [sys.executable, "-m", "counterpoint.cli.main", *role, str(self.file), *join, "--resume"]

    @property
    def run_ids(self) -> list[str]:
        """The ids of its runs that have begun."""
        return run_ids_in(self.output_dir) if self.run_id is None else [self.run_id]

    def obstacle(self) -> str | None:
        """Returns what the start of its process has to wait for, in words; None if nothing."""
        lock = self.output_dir / JOB_LOCK
        holder = holder_of(lock) if self.run_id is None else orchestrator_of(self.output_dir, self.run_id)
        if holder is not None:
            return f"process {holder.pid} on {holder.host}, which is still at work on it"
        if self.joins is not None and not is_running(self.joins):
            return f"the job in {self.joins}, which does not run"
        return None

    @cached_property
    def _job(self) -> JobConfig | None:
        return None if self.joins is not None else self._validate(JobConfig, self.settings)

    def _validate(self, model: type[Model], values: Table) -> Model:
        """Returns the values as a configuration. Raises `UserError`, which names the table or the file that sets each."""
        return validate(model, values, self.shared, self.above)

    def check_files(self, known_models: set[str]) -> None:
        """Checks what it names on this machine. `known_models` are checked already. Raises `UserError`, and as `runs`."""
        job = self._job
        if job is None:
            is_here = self.joins is not None and is_local(self.joins)
        else:
            is_here = job.backend == "local"
            if job.model not in known_models:
                check_model(job.model)
                known_models.add(job.model)
            if is_here:
                check_job_files(job)
        if is_here:
            for run in self.runs:
                check_run_files(run)
                if not run.run_dir.exists():
                    check_beginning(run.training)

    @property
    def ports(self) -> range:
        """The ports that it sets for the servers that it starts. Raises as `runs`."""
        if self._job is None or not self._job.inference.port:
            return range(0)
        servers = self._job.inference
        return range(servers.port, servers.port + servers.replicas)

    @cached_property
    def runs(self) -> list[RunConfig]:
        """The validated configurations of its runs.

        Raises `UserError` for values that the schema, the job to join, or the environments refuse.
        """
        if self._job is not None:
            if self._job.stay:
                raise UserError(
                    f"{self.origin}: stay = true: such a job does not end by itself, and a target must; leave it out"
                )
            runs = self._job.every_run
        else:
            below = values_of_job(str(self.joins)) | {"resume": True}
            runs = [self._validate(RunConfig, merge(below, self.settings))]
        try:
            for run in runs:
                check_run(run)
                if self.joins is not None:
                    check_joins(run, self.joins)
        except UserError as error:
            raise UserError(f"{self.origin}: {error}") from None
        return runs


def check_files(targets: Sequence[Target]) -> None:
    """Raises `UserError` for a model that is not there, and for a file that a target names and that cannot be read."""
    models: set[str] = set()
    for target in targets:
        try:
            target.check_files(models)
        except UserError as error:
            raise UserError(f"{target.origin}: {error}") from None


def targets_of(config: SweepConfig, file: Path) -> list[Target]:
    """Returns all targets, in order. Raises `UserError` for an unknown key, a key that the sweep sets, and an invalid grid."""
    try:
        points = expand(config.grid, config.zip, config.targets, LONGEST_RUN_ID - len(config.name) - 1)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from None
    shared = merge(read_toml(config.file), config.base) if config.file is not None else config.base
    _check_keys(points, config, file)
    return [_target(config, shared, point, file) for point in points]


def _target(config: SweepConfig, shared: Table, point: Point, file: Path) -> Target:
    origin = f"{file}, target {point.target_id}"
    settings = shared
    for path, value in point.values.items():
        try:
            settings = with_value_at(settings, path, value)
        except ValueError as error:
            raise UserError(f"{origin}: {path} = {value!r}: {error}") from None
    above = (Layer(_nested(point.values), lambda path: origin), Layer(config.base, lambda path: f"{file}, [base]"))
    shared_file = str(config.file or file)
    if config.join is not None:
        job, run_id = config.join.absolute(), f"{config.name}.{point.target_id}"
        return Target(
            point.target_id, point.values, settings | {"run_id": run_id}, job, run_id, job, origin, shared_file, above
        )
    if not isinstance(settings.get("output_dir"), str):
        raise UserError(
            f"{file}: output_dir is required and not set: write it below [base]. Each target has its own below it"
        )
    output_dir = Path(settings["output_dir"]).absolute() / config.name / point.target_id
    settings = settings | {"output_dir": str(output_dir), "resume": True}
    return Target(point.target_id, point.values, settings, output_dir, None, None, origin, shared_file, above)


def _nested(values: dict[str, Any]) -> Table:
    """The values as tables below each other, in which a number stands for a position in a list."""
    whole: dict[Any, Any] = {}
    for path, value in values.items():
        *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
        holder = whole
        for part in parents:
            inner = holder.get(part)
            holder[part] = holder = inner if isinstance(inner, dict) else {}
        holder[last] = value
    return whole


def _check_keys(points: list[Point], config: SweepConfig, file: Path) -> None:
    keys = keys_of(JobConfig if config.join is None else RunConfig)
    for point in points:
        for path, value in point.values.items():
            where = f"{file}: {describe_values({path: value})}"
            if path in RESERVED:
                raise UserError(f"{where}\n    {path} is set by the sweep; leave it out")
            pattern = ".".join(ITEM if part.isdigit() else part for part in path.split("."))
            above = [pattern[:position] for position, character in enumerate(pattern) if character == "."]
            if pattern in keys or any(key in keys and keys[key].is_free for key in above):
                continue
            near = nearest(pattern, keys)
            advice = f"; the nearest is {near.replace(ITEM, '0')}" if near else ""
            kind = "a job" if config.join is None else "a run"
            raise UserError(f"{where}\n    {kind} has no such key{advice}")
