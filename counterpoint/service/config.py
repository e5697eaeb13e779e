"""The configuration of the service: `[tinker]` of a job, and what the job adds for the service's own file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from counterpoint.inference.config import PoolConfig
from counterpoint.transport.config import Config, Identifier, TransportConfig


class QuotaConfig(Config):
    """What one key may use."""

    models: int | None = Field(default=None, ge=1)
    """Models open at once: of clients that go on, and were not silent for two minutes. Unset: as many as it likes."""

    tokens_per_day: int | None = Field(default=None, ge=1)
    """Tokens trained and sampled, with prompts, in a day of UTC; beyond, its clients wait for the next day. Unset: no limit."""

    disk_bytes: int | None = Field(default=None, ge=1)
    """Bytes of saved weights and records on the disk, beyond which nothing is saved. Unset: no limit."""


class PriceConfig(Config):
    """What the ledger's entries cost, in a currency of one's own."""

    trained: float = Field(default=0, ge=0)
    """Of a million tokens of `forward_backward`."""

    forward: float = Field(default=0, ge=0)
    """Of a million tokens of `forward`."""

    prompt: float = Field(default=0, ge=0)
    """Of a million tokens of prompts."""

    sampled: float = Field(default=0, ge=0)
    """Of a million tokens of completions."""

    second: float = Field(default=0, ge=0)
    """Of a second of one of the trainer's accelerators."""


class TinkerConfig(Config):
    """The service for the Tinker SDK."""

    host: str = "127.0.0.1"
    """Address at which the service listens. Any but loopback needs `keys_file`."""

    port: int = Field(default=8200, ge=0, le=65535)
    """Port of the service; 0 takes a free one, which the log names."""

    keys_file: Path | None = None
    """A file with the clients' keys, one a line, `tml-` and at least 16 more characters; a name may follow, by which quotas and
    the page call its owner. Unset: any key is taken, and all are one owner, `local`."""

    quota: QuotaConfig = QuotaConfig()
    """What each key may use."""

    quotas: dict[Identifier, QuotaConfig] = {}
    """The same of single keys, by their names in `keys_file`. What one leaves out is as `quota` says."""

    price: PriceConfig = PriceConfig()
    """What the ledger's entries cost."""

    max_rank: int = Field(default=32, ge=1)
    """Highest rank of an adapter."""

    models: list[str] = []
    """Further names by which clients may ask for the job's model, such as `meta-llama/Llama-3.2-1B`."""

    adapters: dict[Identifier, Annotated[Path, AfterValidator(Path.absolute)]] = {}
    """Directories of adapters in PEFT's format that clients may begin with, as `tinker://import/weights/NAME`."""

    client_flags: list[Literal["proto_compress_fwdbwd", "sample_use_retrieve_futures"]] = []
    """Flags of the SDK that are set for all clients: their training data come compressed, or they ask for many samples' results
    at once, of which a new start of the service loses those that were not fetched."""

    max_pending: int = Field(default=4096, ge=1)
    """Requests of one key that have no result yet; the service asks its clients to send further ones later."""

    strict_replay: bool = False
    """Refuse data of a mixture of experts whose sampled tokens have no known routing. Else the trainer routes such tokens itself,
    and their number is told with the results of the data (docs/tinker.md)."""

    routing_bytes: int = Field(default=2**30, ge=2**20)
    """Bytes of the routing of one key's samples that is kept for its data, of a mixture of experts; the oldest makes room."""

    result_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Bytes of one key's results kept in memory until they are fetched; older ones are on the disk."""


class ServiceConfig(TinkerConfig):
    """All that the service reads."""

    output_dir: Path
    """The job's directory."""

    model: str
    """A local directory, a hub name, or a model that `make-model` builds."""

    name: str = ""
    """The model's name for clients, as the job's file has it."""

    max_samplers: int = Field(default=4, ge=1)
    """Adapters that the servers hold at once; one that nobody samples from makes room for another, and is loaded again when
    it is asked for."""

    max_tokens: int = Field(default=8192, ge=2)
    """Tokens of a sample that the trainer takes, and of prompt and completion at the servers."""

    checkpoint_interval: int = Field(default=1, ge=1)
    """Updates of a run between its checkpoints. Until one covers them, the items of a run are kept on the disk."""

    transport: TransportConfig = TransportConfig()
    """The wire to the trainer."""

    inference: PoolConfig = PoolConfig()
    """The servers that sample."""
