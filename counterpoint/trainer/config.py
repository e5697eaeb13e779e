"""The configuration of the trainer's processes. Each run's settings are in its `[training]` (`counterpoint/run/config.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from counterpoint.inference.model_facts import EXPERT_COUNTS
from counterpoint.run.trained import TrainingConfig
from counterpoint.transport.config import Config, Seed, TransportConfig, machine_memory

READY_SECONDS = 600.0
"""How long a trainer, or the first of its ranks, may take to load the model; longer while it computes."""


class TrainerConfig(Config):
    """Settings of the trainer."""

    gone = {"broadcast": "files"}

    output_dir: Path
    """The job's directory."""

    model: str
    """A local directory, a hub name, or a model that `make-model` builds."""

    seed: Seed = 0
    """Seeds the initial adapter weights and all random numbers of the trainer."""

    resume: bool = False
    """Continue from the newest checkpoint. False: the trainer's directory must not hold a checkpoint yet."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device to train on."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of weights and activations; `auto` is bfloat16 on a GPU, float32 on a CPU. The optimizer's state is float32."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads of one rank. Unset: its share of the cores in a job that computes on a CPU, else torch's default."""

    processes: int = Field(default=1, ge=1)
    """Ranks of one node, started by torch's elastic agent when there are several ranks."""

    nodes: int = Field(default=1, ge=1)
    """Nodes with so many ranks each, of a job's trainer. On one machine they are all on it."""

    sharding: bool = False
    """Divide the model's weights, and with full weights their gradients and optimizer state, over all ranks (FSDP2). False: each
    rank holds the whole model. With one rank there is nothing to divide."""

    max_tokens: int = Field(default=8192, ge=16)
    """Tokens of one micro-batch of one rank. A longer sample is refused."""

    activation_checkpointing: bool | Annotated[int, Field(ge=1)] | None = None
    """A number: keep only the inputs of so many layers, the first ones, and their attention over long samples, and compute all
    else in a layer again in the backward pass: much less memory for long rows, for up to a third more time. True: of all layers
    only the inputs, which takes the least memory. The results are the same. Unset: a job that starts chooses as few as its
    GPU's memory allows (docs/gpu.md); on a CPU, and in a trainer that is started alone, none."""

    compile: bool | None = None
    """Compile the decoder layers and the output layer by torch.compile, which takes a C++ compiler or a GPU's Triton, seconds at
    start, and less time after that (docs/training.md). Unset: on a GPU, unless ranks divide the model or share rows."""

    deterministic: bool = False
    """Have torch use algorithms that add in a fixed order, so that a step that is trained again has the same bits on the same
    machine and software. A row with an operation that has none is refused. It may be slower on a GPU, which docs/receipts.md says
    how to measure; a CPU computes the same bits without it."""

    optimizer_offload: bool = False
    """Keep the optimizer's state in the host's memory, and move it to the GPU piece by piece at each update: of AdamW, 8 bytes a
    trained parameter less on the GPU, 10 where the weights are bfloat16. The results are the same."""

    router_replay: bool = True
    """Route tokens in training to the experts that inference chose, where the batch records them."""

    max_runs: int = Field(default=1, ge=1)
    """Runs trained at once, each with an adapter over the one model; further ones wait for a slot. Full weights need 1."""

    allowed_imports: list[str] = []
    """Import paths, as `package.module:name`, that a run's file may name although it is not the operator's: a run that joins
    names environments, advantages and functions by them, and the trainer loads a loss of that name. What is built in needs none,
    and a job adds the losses of its own runs."""

    max_lora_rank: int = Field(default=64, ge=1)
    """Highest rank of a run's adapter."""

    context_parallel: int = Field(default=1, ge=1)
    """Ranks that compute each row together, for samples that do not fit one rank (docs/models.md): rows then have up to this many
    times `max_tokens`. It divides the number of ranks."""

    expert_parallel: int = Field(default=1, ge=1)
    """Ranks that divide a mixture's experts: each owns an equal part, and tokens travel to the owners of their experts
    (docs/models.md). It divides the number of ranks and of experts. 1: a rank has all experts, or gathers them if `sharding`."""

    rank_silence_seconds: float = Field(default=600.0, ge=5)
    """Longest time for which one of several ranks may keep the others waiting, as when it hangs; then all end, and the log says
    which did not answer. It has to exceed the time of a row, of an update, and of loading the model, as the ranks wait for the
    slowest. It also limits their wait for each other at the start, before any has loaded the model."""

    max_waiting_bytes: int | None = Field(default=None, gt=0)
    """Bytes for the waiting batches of all runs together. Unset: half of this machine's memory. A run's share is this divided by
    `max_runs`. A run may always send one batch, whatever its size; a run that otherwise exceeds its share is evicted."""

    stay: bool = False
    """Keep running when all runs are finished, until a stop signal: others may be admitted. False: exit then."""

    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept of each run. The batches after the oldest of them are kept as well, so that training can continue from an
    older checkpoint if a newer one is damaged."""

    keep_broadcasts: int = Field(default=3, ge=2)
    """Weight broadcasts kept of each run."""

    whole_broadcast_every: int = Field(default=1, ge=1)
    """One of so many versions of full weights is published whole, the others as what changed since. 1: all whole."""

    server_dtypes: list[Literal["float32", "bfloat16", "float16"]] = Field(
        default=["float32", "bfloat16", "float16"], min_length=1
    )
    """Precisions of the servers: for each, the proof of published weights has a digest. A job knows them where
    `inference.dtype` is set and its own servers serve. At a server of another precision the probe is the only proof."""

    prometheus_port: int = Field(default=0, ge=0, le=65535)
    """Port of the metrics; 0 takes a free one, which the log names. Of several ranks the first one serves."""

    prometheus_host: str = "127.0.0.1"
    """Address at which the metrics are served. `0.0.0.0` in a container, whose loopback Prometheus does not reach: whoever
    reaches the port can read them."""

    transport: TransportConfig = TransportConfig()
    """The wire to the orchestrators."""

    @model_validator(mode="after")
    def _groups_of_ranks(self) -> TrainerConfig:
        if self.ranks % self.context_parallel:
            raise ValueError(
                f"context_parallel = {self.context_parallel} does not divide the trainer's {self.ranks} ranks "
                "(processes times nodes)"
            )
        if self.ranks % self.expert_parallel:
            raise ValueError(
                f"expert_parallel = {self.expert_parallel} does not divide the trainer's {self.ranks} ranks "
                "(processes times nodes)"
            )
        return self

    @model_validator(mode="after")
    def _experts_of_the_model(self) -> TrainerConfig:
        if (Path(self.model) / "config.json").is_file():  # else it is checked when it has been found
            self.check_model(Path(self.model))
        return self

    def check_model(self, directory: Path) -> None:
        """Raises `ValueError` unless the experts of the model in `directory` can be divided as is asked for."""
        if self.expert_parallel == 1:
            return
        path, key = directory / "config.json", f"expert_parallel = {self.expert_parallel}"
        try:
            given = json.loads(path.read_bytes())
            given = given.get("text_config") or given
            experts = max(_count(given, name) for name in EXPERT_COUNTS)
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{key}: the experts in {path} cannot be counted: {error}") from error
        if not experts:
            raise ValueError(f"{key}, but the model in {directory} has no experts; use expert_parallel = 1")
        if experts % self.expert_parallel:
            raise ValueError(f"{key} does not divide the {experts} experts of the model in {directory}")
        if self.sharded and experts % self.ranks:
            raise ValueError(
                f"{key} with sharding = true: each rank stores whole experts, and the trainer's {self.ranks} ranks (processes "
                f"times nodes) do not divide the {experts} experts of the model in {directory}"
            )

    def refuses_value_head(self, training: TrainingConfig) -> str | None:
        """Returns why this trainer cannot train a run's value head; None if it can, or the run has none."""
        if training.value_head is None:
            return None
        if self.context_parallel > 1:
            return (
                f"training.value_head is set, and the trainer has context_parallel = {self.context_parallel}: no rank has the "
                "states of a whole row; use a trainer with context_parallel = 1, or another algorithm"
            )
        if training.lora is None and self.divided:
            key = "sharding = true" if self.sharded else f"expert_parallel = {self.expert_parallel}"
            return (
                f"training.value_head is set, and training.lora is not: a trainer with {key} cannot train a value "
                "head beside full weights; add [training.lora], or use a trainer without it"
            )
        return None

    @property
    def row_tokens(self) -> int:
        """Most tokens of a row, and of a sample."""
        return self.max_tokens * self.context_parallel

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.processes * self.nodes

    @property
    def sharded(self) -> bool:
        """Whether the model is divided over several ranks."""
        return self.sharding and self.ranks > 1

    def compiles(self, device: str) -> bool:
        """Returns whether layers are compiled on this type of device."""
        together = self.divided or self.context_parallel > 1
        return device == "cuda" and not together if self.compile is None else self.compile

    def checkpointed(self, layers: int) -> int:
        """Returns how many of a model's layers are computed again in the backward pass."""
        given = self.activation_checkpointing
        return min(layers, given) if type(given) is int else layers * bool(given)

    @property
    def divided(self) -> bool:
        """Whether any weight is divided over several ranks, so that all must compute together."""
        return self.sharded or self.expert_parallel > 1

    @property
    def waiting_share(self) -> int:
        """One run's share of `max_waiting_bytes`, in bytes."""
        return (self.max_waiting_bytes or machine_memory() // 2) // self.max_runs


def _count(model: dict[str, object], key: str) -> int:
    count = model.get(key)
    if count is None:
        return 0
    if type(count) is not int or count < 0:
        raise ValueError(f"{key} = {str(count)[:40]}; expected a whole number")
    return count
