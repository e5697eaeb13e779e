"""The memory of one rank of the trainer, by part. `job/plan/dry_run.py` counts what the trainer's own code holds."""

from __future__ import annotations

from pathlib import Path

from job.plan.devices import GIB
from job.plan.dry_run import ModelSizes, StepBytes, model_sizes, moments_bytes, step_bytes
from run.config import TrainingConfig
from trainer.config import TrainerConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

CONTEXT = GIB
"""CUDA's context and NCCL's buffers."""

LEAST_TOKENS = 256
"""Of a row, where the number does not matter."""

FRAGMENTS = 0.05
"""Share of what is allocated that the allocator of a GPU cannot use."""


def trainer_dtype(trainer: TrainerConfig) -> str:
    """Returns the precision on a GPU."""
    return "bfloat16" if trainer.dtype == "auto" else trainer.dtype


def rank_parts(directory: Path, trainer: TrainerConfig, runs: list[TrainingConfig], tokens: int) -> dict[str, int]:
    """Returns the bytes of each part of one rank on a GPU, at the peak of a step with `tokens` tokens of a row on this rank."""
    dtype, offload = trainer_dtype(trainer), trainer.optimizer_offload
    whole = _whole(directory, trainer, runs, tokens)
    sizes = model_sizes(directory)
    ranks = trainer.ranks if trainer.sharded else 1
    divided = _divided(trainer, runs)
    parts = {
        "weights": -(-whole.weights // ranks),
        "gathered layers": gathered_bytes(sizes, BYTES[dtype]) if ranks > 1 else 0,
        "adapters": whole.adapters,
        "masters": 0 if offload else -(-whole.masters // divided),
        "moments": 0 if offload else -(-moments_bytes(whole.trained, runs[0]) // divided),
        "gradients": -(-whole.gradients // divided),
        "activations": whole.activations,
        "row": row_bytes(sizes, trainer, tokens * trainer.context_parallel),
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


def host_parts(directory: Path, trainer: TrainerConfig, runs: list[TrainingConfig]) -> dict[str, int]:
    """Returns the bytes of each part of what rank 0 holds in its host's memory; the others have no published weights."""
    whole = _whole(directory, trainer, runs, LEAST_TOKENS)
    divided = _divided(trainer, runs)
    state = -(-(4 * whole.trained + moments_bytes(whole.trained, runs[0])) // divided)
    parts = {
        "checkpoint": state,
        "held copy": state if any(run.updates_per_step > 1 for run in runs) else 0,
        "offloaded state": -(-(whole.masters + moments_bytes(whole.trained, runs[0])) // divided)
        if trainer.optimizer_offload
        else 0,
        "published weights": whole.weights if divided > 1 else 0,
    }
    return {name: count for name, count in parts.items() if count}


def _whole(directory: Path, trainer: TrainerConfig, runs: list[TrainingConfig], tokens: int) -> StepBytes:
    """What one rank would hold of a model that is not divided."""
    return step_bytes(
        directory,
        trainer_dtype(trainer),
        tokens,
        runs,
        checkpointing=trainer.activation_checkpointing,
        context=trainer.context_parallel,
    )


def _divided(trainer: TrainerConfig, runs: list[TrainingConfig]) -> int:
    """Returns over how many ranks what is trained is divided."""
    return trainer.ranks if trainer.sharded and runs[0].lora is None else 1


def _other_reference(runs: list[TrainingConfig]) -> bool:
    """Whether a run compares with weights that are not the base under its adapter."""
    return any(run.reference is not None and (run.lora is None or run.reference.model is not None) for run in runs)
