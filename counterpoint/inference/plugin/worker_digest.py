"""Sums of hashes (`digest`) of the weights that a vLLM worker holds: a worker extension, called by `collective_rpc`.

Full weights are read from where the kernels read them. That is the parameter itself, except on a CPU: there linear weights
are packed, the parameter is empty or unused, and the weights are read through the kernel with a one-hot input for each
column, which gives each weight exactly. An adapter is read from the slot in which it computes.

A worker reports one sum for each part: each matrix of a fused layer. Ranks with a replica of a part (norms, routers, key and
value heads) report equal sums, and ranks with shards of it report different sums. So the distinct sums add up to the whole
(`join_ranks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from vllm.config import VllmConfig
from vllm.logger import init_logger

from counterpoint.inference.digest import DTYPES, Digest, add_up, hash_sum
from counterpoint.inference.plugin.weights import read_tensors
from counterpoint.transport.telemetry.start_phases import ENGINE, OVER, enter

logger = init_logger(__name__)

COLUMNS_AT_ONCE = 512
"""Columns read through a kernel at once."""

Held = dict[str, int]
"""`hash_sum`s by name of the part."""


class WeightReader:
    """vLLM's `--worker-extension-cls`: the worker gets these methods."""

    model_runner: Any
    vllm_config: VllmConfig
    rank: int
    device: torch.device
    _unread: Iterator[tuple[str, Tensor]]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def counterpoint_begin(self) -> None:
        """Prepares the worker, once, before the first request."""
        from counterpoint.inference.plugin.engine.sampler import use_whole_sampler

        enter(OVER, ENGINE)
        use_whole_sampler(self.model_runner)
        if self.device.type == "cpu":
            from counterpoint.inference.plugin.cpu.embeddings import keep_embeddings_once
            from counterpoint.inference.plugin.cpu.seeds import spare_generators

            spare_generators(self.model_runner)
            keep_embeddings_once(self.model_runner.model)
        if self.vllm_config.aux_output_config.enabled and self.device.type == "cpu":
            from counterpoint.inference.plugin.cpu.routed_experts import capture_routed_experts

            capture_routed_experts(self.model_runner, self.vllm_config)

    def counterpoint_load(self, update_info: dict[str, Any], dtype: str, seconds: float) -> tuple[Held, bool]:
        """Loads weights as vLLM's worker does, in its three calls, and begins to read them back as `counterpoint_read`."""
        self.start_weight_update()
        self.update_weights(update_info)
        self.finish_weight_update()
        return self.counterpoint_read(dtype, seconds)

    def counterpoint_read(self, dtype: str, seconds: float) -> tuple[Held, bool]:
        """Begins to read the whole model, rounded to `dtype`, and reads as `counterpoint_read_on`."""
        self._unread = held_weights(self.model_runner.model, DTYPES[dtype])
        return self.counterpoint_read_on(seconds)

    def counterpoint_read_on(self, seconds: float) -> tuple[Held, bool]:
        """Reads for about so long, in CPU time. Returns the sums of the parts that it has read, and whether they were the last.

        The engine takes its steps between two such calls, so that requests do not wait for the whole model. A busy machine
        stretches reading and steps alike, and each call costs the API server and the engine a millisecond.
        """
        until = time.thread_time() + seconds
        parts: list[tuple[str, Tensor]] = []
        with torch.inference_mode():
            for part in self._unread:
                parts.append(part)
                if time.thread_time() >= until:
                    return _wait_for(iter(parts)), False
        return _wait_for(iter(parts)), True

    def counterpoint_written(self, directory: str, dtype: str, tied: bool) -> Held:
        """Returns the sums of the checkpoint in `directory`, by tensor, on rank 0.

        They are hashed on this device, which may be much faster than a CPU.
        """
        if self.rank:
            return {}
        return _wait_for(written_weights(Path(directory), DTYPES[dtype], self.device, tied))

    def counterpoint_add_adapter(self, name: str, number: int, path: str, dtype: str) -> tuple[Held | None, str]:
        """Loads an adapter in place, and reads it before another can take its slot.

        Returns its sums, None if this rank keeps what it had, and why it could not, or empty. It raises nothing: if one rank
        does, vLLM reads the others' answers as those to the next call.
        """
        from vllm.lora.request import LoRARequest

        held: Held | None = None
        try:
            self.model_runner.add_lora(LoRARequest(name, number, path, load_inplace=True))
            held = {}
            manager = self.model_runner.lora_manager._adapter_manager
            slot = manager.lora_index_to_id.index(number)
            return _wait_for(held_adapter(manager.modules, slot, DTYPES[dtype])), ""
        except Exception as error:
            logger.exception("Adapter %s in %s was not loaded", name, path)
            return held, f"{type(error).__name__}: {error}"

    def counterpoint_make_up_adapter(self, name: str, number: int) -> None:
        """Puts an adapter that is made up into a slot, as vLLM does to measure its memory, and reads it."""
        from vllm.lora.request import LoRARequest

        runner = self.model_runner
        with runner.lora_manager.dummy_lora_cache():
            runner.lora_manager.add_dummy_lora(LoRARequest(name, number, name), rank=runner.lora_config.max_lora_rank)
        manager = runner.lora_manager._adapter_manager
        manager.activate_adapter(number)
        _wait_for(held_adapter(manager.modules, manager.lora_index_to_id.index(number), DTYPES["float32"]))


def join_ranks(ranks: Iterable[Held]) -> Digest:
    """Returns the digest of the weights that several ranks hold together."""
    parts: dict[str, set[int]] = {}
    for held in ranks:
        for name, value in held.items():
            parts.setdefault(name, set()).add(value)
    return add_up((name, sum(values)) for name, values in parts.items())


def provable_layers(written: Digest, held: Digest, what: str) -> frozenset[str]:
    """Returns the layers in which an engine computes with exactly the numbers that it loaded.

    Logs the other layers of `what`.
    """
    equal = frozenset(layer for layer, value in written.items() if held.get(layer) == value)
    if others := sorted(written.keys() - equal):
        named = ", ".join(f"layer {layer}" if layer else "weights outside the layers" for layer in others[:5])
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        logger.warning(
            "%s: %s%s cannot be proven by a digest, because vLLM computes with other numbers than it is given. Only the probe "
            "shows whether they are current",
            what, named, more,
        )  # fmt: skip
    return equal


def restrict(digest: Digest, layers: frozenset[str]) -> Digest:
    """Returns the digest of these layers only."""
    return {layer: value for layer, value in digest.items() if layer in layers}


def held_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields part and `hash_sum` of all weights with which `model` computes.

    A matrix that a kernel holds in addition to the parameter, such as that of a tied output layer, adds nothing to the sum
    if the two agree, and changes it if they differ.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            packed = getattr(module, "cpu_linear", linear) is not linear and parameter is module.weight
            packed = packed and not parameter.is_meta
            computed = _hashed_through(module, dtype) if packed else []
            known = id(parameter) in seen
            seen.add(id(parameter))
            if packed and not parameter.numel():
                yield from ((f"{name}#{index}", value) for index, value in enumerate(computed))
                continue
            for index, part in enumerate(_parts(module, parameter)):
                value = hash_sum(part, dtype)
                if not known:
                    yield f"{name}#{index}", value
                if packed:
                    yield f"{name}#{index} in its kernel", value - computed[index]


def written_weights(
    directory: Path, dtype: torch.dtype, device: torch.device, tied: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yields name and `hash_sum` of each tensor of a checkpoint.

    With `tied` the output layer is the embedding, even if the file has one of its own.
    """
    for name, tensor in read_tensors(directory):
        if tensor.is_floating_point() and not (tied and name == "lm_head.weight"):
            yield name, hash_sum(tensor, dtype, device)


def held_adapter(modules: dict[str, nn.Module], slot: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields part and `hash_sum` of the adapter in a slot. Rows beyond the adapter's rank are zero, and add nothing."""
    for prefix, module in modules.items():
        for name, stacked in vars(module).items():
            # lora_a_stacked, or w13_lora_b_stacked and the like: a tuple of `[slots, ...]`, one for each matrix. The output layer
            # and the embedding have one of theirs alone; a list of experts has views of what is in such tuples.
            if name.endswith(("lora_a_stacked", "lora_b_stacked")) and isinstance(stacked, tuple | Tensor):
                for index, slots in enumerate(stacked if isinstance(stacked, tuple) else (stacked,)):
                    yield f"{prefix}.{name}#{index}", hash_sum(slots[slot], dtype)


def _parts(module: nn.Module, weight: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Returns the matrices that form `weight` on this rank, such as those of q, k and v; `dim` is that of its outputs."""
    sizes = getattr(module, "output_partition_sizes", None)
    if sizes is None or not weight.dim() or sum(sizes) != weight.shape[dim]:
        return (weight,)
    return weight.split(list(sizes), dim)


def _hashed_through(module: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Returns the `hash_sum` of each part of the weight by which the kernel of `module` multiplies.

    The weight is read exactly, since each product is with 0 or 1, and some columns at a time: the order does not matter.
    """
    inputs = (
        module.weight.shape[1] if module.weight.numel() else getattr(module, "input_size_per_partition", None)
    ) or module.input_size
    sums: list[Tensor] = []
    for start in range(0, inputs, COLUMNS_AT_ONCE):
        ones = torch.zeros(min(COLUMNS_AT_ONCE, inputs - start), inputs, dtype=module.weight.dtype)
        ones.diagonal(start).fill_(1)
        parts = _parts(module, module.cpu_linear(ones, module.weight, None), dim=1)
        found = [hash_sum(part, dtype) for part in parts]
        sums = [total + value for total, value in zip(sums, found, strict=True)] if sums else found
    return sums


@torch.inference_mode()
def _wait_for(parts: Iterator[tuple[str, Tensor]]) -> Held:
    named = list(parts)
    values: list[int] = torch.stack([value for _, value in named]).tolist() if named else []
    return dict(zip((name for name, _ in named), values, strict=True))
