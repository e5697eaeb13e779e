"""`JobConfig`: the one file that describes a whole job, and how its values reach the three roles.

What the roles share (directory, model, seed, wire) stands once, at the top, and is filled into their sections; what one role
must know of another (the server's address, its key, the adapter's rank) is derived. The sections are the roles' own models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import model_validator

from inference.config import InferenceConfig, LoraServingConfig
from orchestrator.config import OrchestratorConfig
from trainer.config import TrainerConfig
from transport.config import Config, TransportConfig

SHARED = {
    "inference": ("model", "seed"),
    "trainer": ("output_dir", "model", "seed", "resume", "transport"),
    "orchestrator": ("output_dir", "model", "seed", "resume", "transport"),
}
"""Keys of each section that are filled from the top."""

DEFAULTS: dict[str, Any] = {"seed": 0, "resume": False, "transport": {}}
WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


class GpuConfig(Config):
    """Which GPUs a role sees, by index; unset, it sees all, and vLLM and the trainer meet on the first."""

    inference: list[int] | None = None
    """vLLM's; `inference.tensor_parallel_size` of them at least."""

    trainer: list[int] | None = None
    """The trainer's; `trainer.processes` of them at least."""


class JobConfig(Config):
    """A whole job: inference, a trainer, and one run."""

    output_dir: Path
    """The job's directory. It must be empty, unless `--resume` or `--fresh` says what to do with what is there."""

    model: str
    """A local directory, a hub name, or a model that `make-model` builds (`tiny-moe`, `tiny-dense`)."""

    seed: int = 0
    """Everything random in all three roles."""

    resume: bool = False
    """Go on from the newest checkpoint of each role; `--resume` for short."""

    transport: TransportConfig = TransportConfig()
    """The wire between orchestrator and trainer."""

    gpus: GpuConfig = GpuConfig()
    """Placement on a machine with several GPUs."""

    inference: InferenceConfig
    """The vLLM server."""

    trainer: TrainerConfig
    """The trainer."""

    orchestrator: OrchestratorConfig
    """The run."""

    @model_validator(mode="before")
    @classmethod
    def _fill_sections(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        filled = dict(given)
        for section, names in SHARED.items():
            values = dict(given.get(section, {})) if isinstance(given.get(section, {}), dict) else given[section]
            if not isinstance(values, dict):
                continue  # not a table: its own validation says so
            for name in names:
                shared = given.get(
                    name, DEFAULTS.get(name, "")
                )  # a required one that is missing is reported once, at the top
                if name in values and str(values[name]) != str(shared):
                    raise ValueError(
                        f"{section}.{name} = {values[name]!r} differs from {name} = {shared!r} at the top; "
                        f"a job sets {name} once, at the top"
                    )
                values[name] = shared
            filled[section] = values
        return filled

    @model_validator(mode="after")
    def _wire(self) -> JobConfig:
        pool, server = self.orchestrator.inference, self.inference
        host = WILDCARD_HOSTS.get(server.host, f"[{server.host}]" if ":" in server.host else server.host)
        derived = {"urls": [f"http://{host}:{server.port}"], "api_key_file": server.api_key_file}
        for name, value in derived.items():
            if name in pool.model_fields_set and getattr(pool, name) != value:
                raise ValueError(
                    f"orchestrator.inference.{name} = {getattr(pool, name)!r} does not fit [inference], which gives {value!r}; "
                    "leave it out"
                )
        self.orchestrator.inference = pool.model_copy(update=derived)
        self._fit_adapter()
        self._fit_lengths()
        self._fit_gpus()
        return self

    def _fit_adapter(self) -> None:
        trained, served = self.orchestrator.training.lora, self.inference.lora
        if trained is None and served is not None:
            raise ValueError(
                "inference.lora is set, but orchestrator.training.lora is not: nothing would train an adapter; "
                "set both or neither"
            )
        if trained is None:
            return
        if served is None:
            self.inference = self.inference.model_copy(update={"lora": LoraServingConfig(max_rank=trained.rank)})
        elif trained.rank > served.max_rank:
            raise ValueError(
                f"orchestrator.training.lora.rank = {trained.rank} is above inference.lora.max_rank = {served.max_rank}"
            )

    def _fit_lengths(self) -> None:
        longest, completion = self.inference.max_model_len, self.orchestrator.sampling.max_tokens
        if completion >= longest:
            raise ValueError(
                f"orchestrator.sampling.max_tokens = {completion} leaves no room for a prompt in "
                f"inference.max_model_len = {longest}"
            )
        if self.trainer.max_tokens < longest:
            raise ValueError(
                f"trainer.max_tokens = {self.trainer.max_tokens} is below inference.max_model_len = {longest}: "
                "a sample of that length could not be trained on"
            )

    def _fit_gpus(self) -> None:
        needs = {
            "inference": ("inference.tensor_parallel_size", self.inference.tensor_parallel_size, self.gpus.inference),
            "trainer": ("trainer.processes", self.trainer.processes, self.gpus.trainer),
        }
        for role, (name, needed, given) in needs.items():
            if given is not None and len(given) < needed:
                raise ValueError(f"gpus.{role} = {given} are fewer than {name} = {needed}")

    def with_model(self, directory: Path) -> JobConfig:
        """The same job with the roles' model resolved to a directory, and its output directory absolute."""
        roles = {
            name: section.model_copy(update={"model": str(directory)} | self._absolute_output(section))
            for name, section in (
                ("inference", self.inference),
                ("trainer", self.trainer),
                ("orchestrator", self.orchestrator),
            )
        }
        return self.model_copy(update=roles)

    def _absolute_output(self, section: Config) -> dict[str, Path]:
        return {"output_dir": self.output_dir.absolute()} if hasattr(section, "output_dir") else {}
