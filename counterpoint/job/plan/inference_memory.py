"""The memory of one GPU of a vLLM server, by part.

vLLM measures its activations at start and gives what is left of its share to the KV cache; the activations are an estimate here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from counterpoint.inference.config import InferenceConfig
from counterpoint.job.plan.devices import GIB
from counterpoint.job.plan.dry_run import ModelSizes

UTILIZATION = "--gpu-memory-utilization"

DEFAULT_UTILIZATION = 0.92
"""vLLM 0.32's `--gpu-memory-utilization`."""

ENGINE = int(1.5 * GIB)
"""CUDA's context, NCCL's buffers and CUDA graphs."""

WHOLE_ON_EACH = ("norms", "router")
"""Kinds of weights that tensor parallelism does not divide."""

WIDTH = {"float32": 4, "auto": 2, "bfloat16": 2, "float16": 2}
"""Bytes of an element."""


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """One GPU of a server."""

    parts: dict[str, int]
    """Bytes, with `KV cache` last: what is left of vLLM's share. It is absent where nothing is."""
    share: int
    """Bytes that vLLM may use."""
    token: int
    """Bytes of the KV cache for one token."""
    sequences: int
    """Sequences of `max_model_len` tokens whose KV cache fits; 0 if the server cannot start."""


def utilization(config: InferenceConfig) -> float:
    """Returns vLLM's share of a GPU, from `extra_args`."""
    words = [word.replace("_", "-") for word in config.extra_args]
    for word, following in zip_longest(words, config.extra_args[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name == UTILIZATION:
            return float(value if equals else following)
    return DEFAULT_UTILIZATION


def with_utilization(extra_args: list[str], share: float) -> list[str]:
    """Returns `extra_args` with another share of a GPU, and all else that they have."""
    kept: list[str] = []
    for before, word in zip(["", *extra_args], extra_args, strict=False):
        name, previous = (each.replace("_", "-") for each in (word, before))
        if name.partition("=")[0] != UTILIZATION and previous != UTILIZATION:
            kept.append(word)
    return [*kept, UTILIZATION, f"{share:g}"]


def server_memory(sizes: ModelSizes, config: InferenceConfig, memory: int, part: float | None = None) -> ServerMemory:
    """Returns the memory of one GPU, of `memory` bytes, of a server; with `part` of it instead of the configuration's."""
    width, ranks = WIDTH[config.dtype], config.tensor_parallel_size
    share = int((utilization(config) if part is None else part) * memory)
    parts = {
        "weights": width * weights_of_rank(sizes, ranks),
        "adapter slots": width * adapter_slots(sizes, config),
        "activations": activations(sizes, config, width),
        "engine": ENGINE,
    }
    parts["KV cache"] = max(0, share - sum(parts.values()))
    token = kv_bytes(sizes, ranks, width)
    sequences = parts["KV cache"] // (token * config.max_model_len)
    return ServerMemory({name: count for name, count in parts.items() if count}, share, token, sequences)


def weights_of_rank(sizes: ModelSizes, ranks: int) -> int:
    """Returns the parameters on one of the GPUs that share a copy of the model."""
    whole = sum(count for kind, count in sizes.parameters.items() if kind in WHOLE_ON_EACH)
    return whole + -(-(sizes.total - whole) // ranks)


def adapter_slots(sizes: ModelSizes, config: InferenceConfig) -> int:
    """Returns the elements of the adapters that compute at once, of the largest rank, on each linear layer."""
    if config.lora is None:
        return 0
    one = sum(
        shape[-1] * config.lora.max_rank * _product(shape[:-2])
        + shape[-2] * config.lora.max_rank * _product(shape[:-2])
        for shapes in sizes.linear_layers.values()
        for shape in shapes
    )
    return one * config.lora.max_adapters


def activations(sizes: ModelSizes, config: InferenceConfig, width: int) -> int:
    """Returns an estimate of a step's activations: its widest layer and a few hidden states, and the sampled logits twice."""
    rows = config.max_num_batched_tokens * (4 * sizes.hidden + sizes.widest // config.tensor_parallel_size)
    return width * rows + 2 * 4 * config.max_num_seqs * sizes.vocabulary


def kv_bytes(sizes: ModelSizes, ranks: int, width: int) -> int:
    """Returns the bytes of one token's keys and values on one GPU; a head is never divided."""
    return 2 * sizes.layers * max(1, sizes.kv_heads // ranks) * sizes.head_dim * width


def _product(numbers: tuple[int, ...]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product
