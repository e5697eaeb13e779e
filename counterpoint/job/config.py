"""`JobConfig`: the one file that describes a whole job, and how its values reach the roles.

Values that the roles share (directory, model, seed, wire) stand once, at the top, and are copied into their sections. Values that
the runs share stand once, in `[orchestrator]`; each of `[[runs]]` adds its own. Values that one role takes from another (the
servers' addresses, their key, the adapters' ranks) are derived in `counterpoint/job/derive.py`. The sections are the roles' own
models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationInfo, field_validator, model_validator

from counterpoint.inference.config import InferenceConfig
from counterpoint.job.configuration.load import merge
from counterpoint.job.derive import derive, pool_of
from counterpoint.job.directory import is_only_run
from counterpoint.job.sections import FIRST_PORT, JobSections
from counterpoint.run.config import RunConfig
from counterpoint.service.config import TinkerConfig
from counterpoint.transport.config import Config

SHARED = {
    "inference": ("model", "seed"),
    "trainer": ("output_dir", "model", "seed", "resume", "transport", "prometheus_host"),
    "orchestrator": ("output_dir", "model", "seed", "resume", "transport", "prometheus_host"),
}
"""Keys of each section that are copied from the top."""

DEFAULTS: dict[str, Any] = {"seed": 0, "resume": False, "transport": {}, "prometheus_host": "127.0.0.1"}


class JobConfig(JobSections):
    """A whole job: inference, a trainer, and one run or several."""

    @model_validator(mode="before")
    @classmethod
    def _fill_sections(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        serves = cls.model_fields["tinker"].default is not None
        given = _with_service(({"tinker": {}} if serves else {}) | given)
        filled = dict(given)
        for section, names in SHARED.items():
            values = dict(given.get(section, {})) if isinstance(given.get(section, {}), dict) else given[section]
            if not isinstance(values, dict):
                continue  # not a table: its own validation reports it
            for name in names:
                shared = given.get(name, DEFAULTS.get(name, ""))  # a missing required key is reported once, at the top
                if name in values and str(values[name]) != str(shared):
                    raise ValueError(
                        f"{section}.{name} = {values[name]!r} differs from {name} = {shared!r} at the top; "
                        f"a job sets {name} once, at the top"
                    )
                values[name] = shared
            filled[section] = values
        return filled

    @field_validator("serve", "tinker", mode="before")
    @classmethod
    def _switch(cls, given: Any) -> Any:
        return {} if given is True else None if given is False else given

    @field_validator("runs", mode="before")
    @classmethod
    def _inherit(cls, given: Any, info: ValidationInfo) -> Any:
        """Merges `[orchestrator]` into each run. It is validated first, so its errors are reported once."""
        shared = info.data.get("orchestrator")
        if not isinstance(given, list) or shared is None:
            return given if shared is not None else []
        inherited = shared.model_dump(exclude_unset=True, exclude={"run_id"})
        runs = []
        for position, run in enumerate(given):
            if not isinstance(run, dict):
                return given  # not tables: pydantic reports it
            if "run_id" not in run:
                raise ValueError(f"runs[{position}].run_id is required and not set: it names the run's directory")
            runs.append(merge(inherited, run))
        return runs

    @model_validator(mode="after")
    def _derive(self) -> JobConfig:
        named = {f"runs[{position}]": run for position, run in enumerate(self.runs)}
        if self.every_run and not self.runs:
            named = {"orchestrator": self.orchestrator}
        derive(self, named)
        return self

    def table(self) -> dict[str, Any]:
        """Does as `Config.table`; beside runs, `[orchestrator]` has only what was set there.

        The runs inherit all that it has, and the defaults of its kind of loss may have no meaning for theirs. The addresses of
        servers are left out where their port is not chosen yet.
        """
        values = super().table()
        if self.inference.replicas and not self.inference.port:
            for run in (values["orchestrator"], *values["runs"]):
                del run["inference"]["urls"]
        if self.runs:
            values["orchestrator"] = self.orchestrator.model_dump(
                mode="json", exclude_none=True, exclude_unset=True, exclude=set(SHARED["orchestrator"])
            )
        return values

    @property
    def every_run(self) -> list[RunConfig]:
        """The job's own runs: at least one, unless the job stays for guests."""
        run = self.orchestrator
        return [run] if is_only_run(self.runs, self.stay, run.environments) else self.runs

    def server(self, position: int) -> InferenceConfig:
        """Returns the configuration of one server, for its role's file."""
        first = self.inference.port or FIRST_PORT  # before a start: where the search for a free one begins
        own = self.inference.model_dump(exclude={"replicas"}) | {"port": first + position}
        return InferenceConfig.model_validate(own)

    def with_port(self, port: int) -> JobConfig:
        """Returns the job with its first server at `port`, where its runs ask for it."""
        if port == self.inference.port:
            return self
        job = self.model_copy(update={"inference": self.inference.model_copy(update={"port": port})})

        def of(run: Run) -> Run:
            return run.model_copy(update={"inference": pool_of(job, run.run_id, run.inference)})

        return job.model_copy(update={"orchestrator": of(self.orchestrator), "runs": [*map(of, self.runs)]})

    def with_model(self, directory: Path) -> JobConfig:
        """Returns the job with its model resolved to `directory` and with absolute paths, as its roles get it.

        A guest may be started from another current directory.
        """
        model = {"model": str(directory)}
        return self.model_copy(
            update={
                "inference": _absolute(self.inference).model_copy(update=model),
                "trainer": _absolute(self.trainer).model_copy(update=model),
                "orchestrator": _absolute(self.orchestrator).model_copy(update=model),
                "runs": [_absolute(run).model_copy(update=model) for run in self.runs],
            }
        )


def _with_service(given: dict[str, Any]) -> dict[str, Any]:
    """Returns a job file's table with what a service for the Tinker SDK implies: the job stays, for adapters of its clients."""
    service = {} if given.get("tinker") is True else given.get("tinker")
    runs = given.get("orchestrator", {})
    if not isinstance(service, dict) or not isinstance(runs, dict):
        return given
    if given.get("runs") or runs.get("environments"):  # which say themselves what they train
        return given | {"stay": True}
    rank = service.get("max_rank", TinkerConfig().max_rank)
    training = {"lora": {"rank": rank}, **runs.get("training", {})}
    return given | {"stay": True, "orchestrator": runs | {"training": training}}


Section = TypeVar("Section", bound=Config)
Run = TypeVar("Run", bound=RunConfig)


def _absolute(section: Section) -> Section:
    """The same section with absolute paths, in its tables, too."""
    changed: dict[str, Any] = {}
    for name, value in section:
        if isinstance(value, Path):
            changed[name] = value.absolute()
        elif isinstance(value, Config):
            changed[name] = _absolute(value)
    return section.model_copy(update=changed)
