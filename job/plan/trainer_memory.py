"""The memory of one rank of the trainer, by part. `job/plan/dry_run.py` counts what the trainer's own code holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from job.plan.devices import GIB
from job.plan.dry_run import ModelSizes, model_sizes, moments_bytes, step_bytes
from run.config import TrainingConfig
from trainer.config import TrainerConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

CONTEXT = GIB
"""CUDA's context and NCCL's buffers."""

FRAGMENTS = 0.05
"""Share of what is allocated that the allocator of a GPU cannot use."""


def trainer_dtype(trainer: TrainerConfig) -> str:
    """Returns the precision on a GPU."""
    return "bfloat16" if trainer.dtype == "auto" else trainer.dtype


def rank_parts(directory: Path, trainer: TrainerConfig, runs: list[TrainingConfig], tokens: int) -> dict[str, int]:
    """Returns the bytes of each part of one rank at the peak of a step with rows of `tokens` tokens, on a GPU."""
    dtype = trainer_dtype(trainer)
    checkpointing = trainer.activation_checkpointing
    whole = step_bytes(directory, dtype, tokens, runs, checkpointing=checkpointing)
    sizes = model_sizes(directory)
    ranks = trainer.ranks if _sharded(trainer) else 1
    full = runs[0].lora is None
    divided = ranks if full else 1
    offload = bool(getattr(trainer, "optimizer_offload", False))
    parts = {
        "weights": -(-whole.weights // ranks),
        "gathered layers": gathered_bytes(sizes, BYTES[dtype]) if ranks > 1 else 0,
        "adapters": whole.adapters,
        "masters": 0 if offload else -(-whole.masters // divided),
        "moments": 0 if offload else -(-moments_bytes(whole.trained, runs[0]) // divided),
        "gradients": -(-whole.gradients // divided),
        "activations": whole.activations,
        "row": row_bytes(sizes, trainer, tokens),
        "reference": whole.weights if _other_reference(runs) else 0,
    }
    allocated = sum(parts.values())
    return {name: count for name, count in parts.items() if count} | {
        "context and fragments": CONTEXT + int(FRAGMENTS * allocated)
    }


def gathered_bytes(sizes: ModelSizes, width: int) -> int:
    """Bytes of the whole weights that a sharded model holds at once: two layers, the embeddings and the output layer."""
    return width * (2 * sizes.largest_layer + sizes.outside_layers)


def row_bytes(sizes: ModelSizes, trainer: TrainerConfig, tokens: int) -> int:
    """Bytes of a row's own columns: token ids, positions, targets, weights, and the recorded routing as indices."""
    routed = sizes.layers * sizes.experts_per_token * 8 if trainer.router_replay else 0
    return tokens * (8 * 8 + routed)


def host_bytes(trained: int, runs: list[TrainingConfig], trainer: TrainerConfig) -> int:
    """Bytes of the host's memory: the copy of one checkpoint, and the optimizer's state if it is there."""
    state = 4 * trained + moments_bytes(trained, runs[0])
    return state * (2 if getattr(trainer, "optimizer_offload", False) else 1)


def _sharded(trainer: Any) -> bool:
    return bool(getattr(trainer, "sharding", False)) and trainer.ranks > 1


def _other_reference(runs: list[TrainingConfig]) -> bool:
    """Whether a run compares with weights that are not the base under its adapter."""
    references = [(run, getattr(run, "reference", None)) for run in runs]
    return any(
        reference is not None and (run.lora is None or getattr(reference, "model", None) is not None)
        for run, reference in references
    )
