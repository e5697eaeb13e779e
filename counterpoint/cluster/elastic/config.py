"""The `config` of an elastic role: what to train, on how many workers, and how carefully their nodes are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from counterpoint.cluster.elastic.scaling import ScalingConfig
from counterpoint.transport.config import Config
from counterpoint.transport.configuration.explain import validate
from counterpoint.transport.process.ranks.node import LOOPBACK, python_command


class ElasticConfig(Config):
    """Given to the ElasticMaster and its ElasticWorkers alike. Exactly one of `script` and `module` is set."""

    script: str = ""
    """A Python file, run once a rank with torchrun's environment variables."""
    module: str = ""
    """A Python module to run instead, as with `python -m`."""
    arguments: tuple[str, ...] = ()
    """The arguments of the command."""
    restart_arguments: tuple[str, ...] = ()
    """Added to them whenever ranks may have run before."""
    local_ranks: int = Field(default=1, ge=1)
    """Ranks on each worker; with GPUs, as many as it has."""
    min_workers: int | None = Field(default=None, ge=1)
    """Fewest workers to train with. Unset: the role's count."""
    max_workers: int | None = Field(default=None, ge=1)
    """Most workers to train with; others wait as spares. Unset: the role's count."""
    check: bool = True
    """Whether nodes are checked before each round."""
    check_seconds: float = Field(default=60.0, gt=0)
    """Longest time of each check, of a node or of a pair, the start of torch included."""
    join_seconds: float = Field(default=30.0, gt=0)
    """How long enough workers wait for more of them; also, how long ranks may take to find one another."""
    settle_seconds: float = Field(default=2.0, ge=0)
    """Time that passes after a worker joined during training, before all ranks are restarted with it."""
    stop_seconds: float = Field(default=30.0, gt=0)
    """How long ranks may take to end after SIGTERM; then they are killed."""
    max_restarts: int = Field(default=10, ge=0)
    """How often in a row the script may fail. The deaths of workers are not counted here, but by their role."""
    host: str = LOOPBACK
    """The address on its node at which a worker's stores listen; `{node}` stands for the node's name, `{address}` for the address
    at which the worker takes calls (loopback where these come from this machine only). torch's stores and gloo ask for no key:
    beyond loopback, the network must be trusted."""
    scaling: ScalingConfig | None = None
    """Adds and removes workers by the training's progress. Unset: only `scale` does."""
    ready_seconds: float = Field(default=600.0, gt=0)
    """How long rank 0 of a service (`service.py`) may take to be ready; then all its ranks are killed."""
    drain_seconds: float = Field(default=100.0, gt=0)
    """How long rank 0 of a service may take to end its ranks in order; then they are ended as between rounds."""
    silence_seconds: float | None = Field(default=None, gt=0)
    """The longest time without a heartbeat of a service's rank 0; then all its ranks are killed. Unset: none is expected."""
    version: str = ""
    """Tells this role from one whose files are the same, but not their content. Not used here."""

    @model_validator(mode="after")
    def _consistent(self) -> ElasticConfig:
        python_command(self.script, self.module)
        return self

    def command(self, again: bool) -> tuple[str, ...]:
        """Returns each rank's command. `again`: ranks may have run before."""
        return python_command(self.script, self.module, self.arguments + (self.restart_arguments if again else ()))

    def limits(self, count: int) -> tuple[int, int]:
        """Returns the fewest and the most workers of a round, for a role of so many. Raises `ValueError` if they contradict."""
        most = self.max_workers or max(count, self.min_workers or 1)
        fewest = self.min_workers or min(count, most)
        if fewest > most:
            raise ValueError(f"min_workers = {fewest} is more than max_workers = {most}")
        return fewest, most


def elastic_config(config: Mapping[str, Any]) -> ElasticConfig:
    """Returns a role's `config`, validated. Raises `UserError` that names each wrong key, its value, and what is allowed."""
    return validate(ElasticConfig, dict(config), "the elastic role's config")
