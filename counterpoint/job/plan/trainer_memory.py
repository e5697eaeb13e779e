"""The memory of one rank of the trainer, by part. `counterpoint/job/plan/dry_run.py` counts what the trainer's own code holds."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from pathlib import Path

from counterpoint.job.plan.devices import GIB
from counterpoint.job.plan.dry_run import ModelSizes, StepBytes, model_sizes, step_bytes
from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.config import TrainerConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

CONTEXT = GIB
"""CUDA's context and NCCL's buffers."""

LEAST_TOKENS = 256
"""The length of a row where the number does not matter."""

FRAGMENTS = 0.05
"""Share of what is allocated that the allocator of a GPU cannot use."""


def trainer_dtype(trainer: TrainerConfig) -> str:
    """Returns the precision on a GPU."""
    return "bfloat16" if trainer.dtype == "auto" else trainer.dtype


def rank_parts(
    directory: Path, trainer: TrainerConfig, runs: list[TrainingConfig], tokens: int, memory: int | None
) -> dict[str, int]:
    """Returns the bytes of each part of one rank on a GPU, at the peak of a step with `tokens` tokens of a row on this rank.

    `memory` is that of the GPU, in bytes, by which the trainer chooses the chunks of the output layer; None: as on a CPU.
    """
    dtype, offload = trainer_dtype(trainer), trainer.optimizer_offload
    whole = _whole(directory, trainer, runs, tokens, memory)
    sizes = model_sizes(directory)
    own, trained = own_share(sizes, trainer), trained_share(sizes, trainer, runs)
    parts = {
        "weights": ceil(whole.weights * own),
        "gathered layers": gathered_bytes(sizes, trainer, BYTES[dtype]) if trainer.sharded else 0,
        "adapters": whole.adapters,
        "masters": 0 if offload else ceil(whole.masters * trained),
        "moments": 0 if offload else ceil(whole.moments * trained),
        "gradients": ceil(whole.gradients * trained),
        "activations": whole.activations,
        "exchanged tokens": exchange_bytes(sizes, trainer, tokens, BYTES[dtype]),
        "row": row_bytes(sizes, trainer, tokens * trainer.context_parallel),
        "reference": reference_bytes(directory, whole.weights, trainer, runs),
    }
    allocated = sum(parts.values())
    return {name: count for name, count in parts.items() if count} | {
        "context and fragments": CONTEXT + int(FRAGMENTS * allocated)
    }


def own_share(sizes: ModelSizes, trainer: TrainerConfig) -> Fraction:
    """Returns the share of a model's weights that a rank stores."""
    if trainer.sharded:
        return Fraction(1, trainer.ranks)
    return 1 - Fraction(sizes.expert_weights, sizes.total) * (1 - Fraction(1, trainer.expert_parallel))


def trained_share(sizes: ModelSizes, trainer: TrainerConfig, runs: list[TrainingConfig]) -> Fraction:
    """Returns the share of what is trained that a rank has; adapters are whole everywhere."""
    return own_share(sizes, trainer) if runs[0].lora is None else Fraction(1)


def gathered_bytes(sizes: ModelSizes, trainer: TrainerConfig, width: int) -> int:
    """Bytes of the weights that a sharded model holds at once: two layers, the embeddings and the output layer.

    Experts that ranks divide are gathered from the ranks that own the same; where there are none, they are not gathered.
    """
    parallel, layer = trainer.expert_parallel, sizes.largest_layer
    if parallel > 1:
        experts = sizes.expert_weights // sizes.expert_layers
        layer -= experts - (experts // parallel if trainer.ranks > parallel else 0)
    return width * (2 * layer + sizes.outside_layers)


def exchange_bytes(sizes: ModelSizes, trainer: TrainerConfig, tokens: int, width: int) -> int:
    """Bytes of the tokens that ranks with divided experts exchange, if each rank gets as many as it sends.

    In one layer these are hidden states on their way there and back, sent and received. Of each layer the places of the pairs of
    token and expert are kept: four indices, or with activation checkpointing one.
    """
    if trainer.expert_parallel == 1:
        return 0
    pairs = tokens * sizes.experts_per_token
    kept = 4 * sizes.expert_layers - 3 * min(trainer.checkpointed(sizes.layers), sizes.expert_layers)
    return pairs * (4 * width * sizes.hidden + 8 * kept)


def row_bytes(sizes: ModelSizes, trainer: TrainerConfig, tokens: int) -> int:
    """Bytes of a row's own columns: token ids, positions, targets, weights, and the recorded routing as indices."""
    routed = sizes.layers * sizes.experts_per_token * 8 if trainer.router_replay else 0
    return tokens * (8 * 8 + routed)


def reference_bytes(directory: Path, weights: int, trainer: TrainerConfig, runs: list[TrainingConfig]) -> int:
    """Bytes of the models that runs compare with, each loaded once; the base under an adapter is there anyway.

    `weights` are those of the model in `directory`, which is trained. Raises `ValueError` for a model that cannot be planned.
    """
    compared = {
        run.reference.model or directory
        for run in runs
        if run.reference is not None and (run.lora is None or run.reference.model is not None)
    }
    width = BYTES[trainer_dtype(trainer)]
    total = sum(weights if path == directory else width * model_sizes(path).total for path in compared)
    return ceil(total / (trainer.ranks if trainer.sharded else 1))


def host_parts(directory: Path, trainer: TrainerConfig, runs: list[TrainingConfig]) -> dict[str, int]:
    """Returns the bytes of each part of what rank 0 holds in its host's memory; the others have no published weights."""
    whole = _whole(directory, trainer, runs, LEAST_TOKENS, None)
    trained = trained_share(model_sizes(directory), trainer, runs)
    state = ceil(state_bytes(directory, trainer, runs) * trained)
    parts = {
        "checkpoint": state,
        "held copy": state if any(run.updates_per_step > 1 for run in runs) else 0,
        "offloaded state": ceil((whole.masters + whole.moments) * trained) if trainer.optimizer_offload else 0,
        "published weights": whole.weights if trained < 1 else 0,
    }
    return {name: count for name, count in parts.items() if count}


def state_bytes(directory: Path, trainer: TrainerConfig, runs: list[TrainingConfig]) -> int:
    """Returns the bytes of one checkpoint of all runs together, on all ranks: trained parameters in float32, and moments."""
    whole = _whole(directory, trainer, runs, LEAST_TOKENS, None)
    return 4 * whole.trained + whole.moments


def _whole(
    directory: Path, trainer: TrainerConfig, runs: list[TrainingConfig], tokens: int, memory: int | None
) -> StepBytes:
    """What one rank would hold of a model that is not divided."""
    compiled = memory is not None and trainer.compiles("cuda")
    return step_bytes(
        directory,
        trainer_dtype(trainer),
        tokens,
        runs,
        checkpointing=trainer.activation_checkpointing or False,
        context=trainer.context_parallel,
        memory=memory,
        compiled=compiled,
    )
