"""The bodies of requests about sessions, models, losses and samplers, as the SDK sends them, without unused fields."""

from __future__ import annotations

from typing import Any

import msgspec

from counterpoint.service.records.structs import Number, Position


class CreateSession(msgspec.Struct, frozen=True):
    """The body of `create_session`."""

    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    project_id: str | None = None


class LoraRequest(msgspec.Struct, frozen=True):
    """`lora_config` of `create_model`."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerRequest(msgspec.Struct, frozen=True):
    """`optimizer_config`."""

    type: str = "adamw"


class CreateModel(msgspec.Struct, frozen=True):
    """The body of `create_model`."""

    session_id: str
    model_seq_id: Position
    base_model: str
    lora_config: LoraRequest | None = None
    optimizer_config: OptimizerRequest = OptimizerRequest()
    user_metadata: dict[str, Any] | None = None


class LoadWeights(msgspec.Struct, frozen=True):
    """The body of `load_weights`, by which a model begins with saved weights: a new one, or one without a request yet."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Position | None = None
    base_model: str | None = None
    optimizer_config: OptimizerRequest | None = None
    user_metadata: dict[str, Any] | None = None


class CreateLoss(msgspec.Struct, frozen=True):
    """The body of `create_custom_loss`."""

    session_id: str
    custom_loss_seq_id: Position
    inputs: msgspec.Raw
    graph: msgspec.Raw


class CreateSampler(msgspec.Struct, frozen=True):
    """The body of `create_sampling_session`."""

    session_id: str
    sampling_session_seq_id: Position
    base_model: str | None = None
    model_path: str | None = None
