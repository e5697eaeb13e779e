"""Configuration of the trainer's processes. What differs between runs is in a run's `[training]` (`run/config.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from transport.config import Config, TransportConfig, machine_memory


class TrainerConfig(Config):
    """The trainer."""

    output_dir: Path
    """The job's directory."""

    model: str
    """A local directory, a hub name, or a model that `make-model` builds."""

    seed: int = 0
    """Initial adapter weights and everything random in the trainer."""

    resume: bool = False
    """Go on from the newest checkpoint. False: the trainer's directory must not hold a checkpoint yet."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of weights and activations; `auto` is bfloat16 on a GPU, float32 on a CPU. The optimizer's state is float32."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads of one rank. Unset: torch decides."""

    processes: int = Field(default=1, ge=1)
    """Ranks, started by `torchrun` when more than one."""

    max_tokens: int = Field(default=8192, ge=16)
    """Tokens of one micro-batch of one rank. A longer sample is refused."""

    router_replay: bool = True
    """Route tokens in training to the experts inference chose, where the batch says which."""

    max_runs: int = Field(default=1, ge=1)
    """Runs trained at once, each with an adapter over the one model; further ones wait for a slot. Full weights need 1."""

    max_lora_rank: int = Field(default=64, ge=1)
    """Highest rank of a run's adapter."""

    max_waiting_bytes: int | None = Field(default=None, gt=0)
    """Memory for the waiting batches of all runs together; unset: half of this machine's. A run's share is this divided by
    `max_runs`. A run may always send one batch, whatever its size; a run that otherwise exceeds its share is evicted."""

    stay: bool = False
    """Stay when every run is finished, until told to stop: others may come. False: end by itself then."""

    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept of each run. The batches after the oldest of them are kept as well, so that a damaged newer one can be
    removed and done without."""

    keep_broadcasts: int = Field(default=3, ge=2)
    """Weight broadcasts kept of each run."""

    transport: TransportConfig = TransportConfig()
    """The wire to the orchestrators."""

    @property
    def waiting_share(self) -> int:
        """Bytes: one run's share of `max_waiting_bytes`."""
        return (self.max_waiting_bytes or machine_memory() // 2) // self.max_runs
