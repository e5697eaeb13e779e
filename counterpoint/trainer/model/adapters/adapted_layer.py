"""The adapters of one layer: a low-rank product for each slot, and which tokens of a packed row use which.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; many adapters over one base as in Chen et al.,
"Punica: Multi-Tenant LoRA Serving", 2023. `counterpoint/trainer/lora/multi_lora.py` has the layers that use this. Shape suffixes
as in `transport/records.py`, and `E` for experts, `R` for rank, `I` and `O` for a weight's inputs and outputs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from counterpoint.trainer.model.adapters.factor_stacks import ALIGNMENT, LowRank, RowFactors, Stack
from counterpoint.trainer.model.without_waiting import on_device


@dataclass(frozen=True, slots=True)
class AdapterSpans:
    """The slots of a packed row's tokens: `lengths[i]` tokens of slot `slots[i]`, end to end."""

    slots: tuple[int, ...]
    lengths: tuple[int, ...]
    ends: Tensor
    """int32 `[spans]`: where each span ends, on the device."""
    span_T: Tensor
    """int64 `[T]`: which span each token is in, on the device."""
    slot_T: Tensor
    """int64 `[T]`: the slot of each token, on the device."""

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], device: torch.device) -> AdapterSpans:
        """Makes the spans from `(slot, tokens)` in the order of the row."""
        lengths = tuple(tokens for _, tokens in spans)
        slots = tuple(slot for slot, _ in spans)
        ends = torch.tensor(list(accumulate(lengths)), dtype=torch.int32)
        span_T = torch.arange(len(spans)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        slot_T = torch.tensor(slots, dtype=torch.int64)[span_T]
        return cls(slots, lengths, *(on_device(each, device) for each in (ends, span_T, slot_T)))


@dataclass(frozen=True, slots=True)
class PeftNames:
    """How a layer is called in the files of an adapter (`counterpoint/trainer/lora/peft_names.py`)."""

    stored: Mapping[str, str]
    """The names in the file, by a part's name in the layer: `0.gate_proj` of experts, or `""` of a layer without parts."""
    target_modules: tuple[str, ...]
    """What the description calls it, as a module."""
    target_parameters: tuple[str, ...]
    """What the description calls it, as weights."""


class Registry(Protocol):
    """What layers register with: the `MultiRunManager`."""

    def register_module(self, prefix: str, module: MultiLora) -> None:
        """Adds a layer at module path `prefix`."""


class MultiLora(nn.Module):
    """A layer with up to `n_adapters` adapters by slot, each a low-rank product for each of its base weights."""

    def __init__(self, base_layer: nn.Module, names: Mapping[str, str], rank: int, n_adapters: int) -> None:
        """Wraps `base_layer`; `names`: of its weights `[O, I]` or `[E, O, I]`, by the prefix of their adapters' names.

        `rank` is the highest rank of an adapter. Each has a rank of its own, and takes memory from its admission on.
        """
        super().__init__()
        self.base = base_layer
        self.rank = rank
        self.n_adapters = n_adapters
        self.spans: AdapterSpans | None = None
        self.peft_names = PeftNames({}, (), ())
        # Not submodules: the model's parameters are those of its base, and a slot's parameters belong to its run.
        self.adapters: dict[int, dict[str, LowRank]] = {}
        self._names = dict(names)
        self._stacks: dict[str, list[Stack]] = {}

    def register_with_runs(self, manager: Registry, module_name: str) -> None:
        """Has `manager` reset, release and return the adapters of this layer, which is at module path `module_name`."""
        manager.register_module(module_name, self)

    def admit(self, slot: int, rank: int, alpha: float, generator: torch.Generator) -> None:
        """Puts a fresh adapter into a slot: A random, B zero, so that it changes nothing until it is trained.

        `generator` is on the CPU, whatever the device, so that a seed gives the same adapter everywhere. The parameters of a slot
        that has an adapter of that rank take the new values, so that its optimizer goes on with them. Raises `ValueError` for a
        rank above that of the layer.
        """
        assert 0 <= slot < self.n_adapters, f"slot {slot} of {self.n_adapters}"
        if rank > self.rank:
            raise ValueError(f"an adapter of rank {rank} for slot {slot}: this layer takes ranks up to {self.rank}")
        self._dissolve_stacks()
        before = self.adapters.get(slot, {})
        self.adapters[slot] = {
            prefix: _in_place(before.get(prefix), _fresh(self.base_weight(prefix), rank, alpha, generator))
            for prefix in self._names
        }

    def base_weight(self, prefix: str) -> Tensor:
        """Returns the base's weight; not always the same tensor, as a sharded model exchanges it while it computes."""
        weight: Tensor = getattr(self.base, self._names[prefix])
        return weight

    def release(self, slot: int) -> None:
        """Removes the adapter from the slot. An empty slot stays empty."""
        self._dissolve_stacks()
        self.adapters.pop(slot, None)

    def _dissolve_stacks(self) -> None:
        # First: if memory lacks half-way, no row may take stacks of which some parameters have left.
        dissolved, self._stacks = self._stacks, {}
        for stack in (each for stacks in dissolved.values() for each in stacks):
            stack.dissolve()

    def adapter_parameters(self, slot: int) -> dict[str, nn.Parameter]:
        """Returns the leaf parameters of a slot, float32, by name; empty without an adapter on this layer."""
        parameters: dict[str, nn.Parameter] = {}
        for prefix, product in self.adapters.get(slot, {}).items():
            parameters |= {f"{prefix}lora_A": product.lora_A, f"{prefix}lora_B": product.lora_B}
        return parameters

    @abstractmethod
    def adapter_state(self, slot: int) -> dict[str, Tensor]:
        """Returns the weights of a slot by the part's own name, such as `0.gate_proj.lora_A.weight`, or `lora_A.weight`.

        Empty without an adapter on this layer. The tensors may share memory with the parameters.
        """

    def row_factors(self, prefix: str, slots: Sequence[int], own: slice | None = None) -> RowFactors:
        """Returns the factors for groups of tokens of these slots, which may have no adapter; of `own` experts alone, if given.

        The first row after an adapter has come or gone makes the stacks.
        """
        if prefix not in self._stacks:
            kinds: dict[tuple[int, bool], dict[int, LowRank]] = {}
            for slot, products in sorted(self.adapters.items()):
                product = products[prefix]
                kinds.setdefault((product.rank, product.lora_A.requires_grad), {})[slot] = product
            self._stacks[prefix] = [Stack(each) for each in kinds.values()]
        return RowFactors(self._stacks[prefix], slots, own)


@contextmanager
def applied(layers: Sequence[MultiLora], spans: AdapterSpans | None) -> Iterator[None]:
    """Has these spans on the layers in forward passes inside, and then what they had before, each layer its own."""
    before = [layer.spans for layer in layers]
    for layer in layers:
        layer.spans = spans
    try:
        yield
    finally:
        for layer, former in zip(layers, before, strict=True):
            layer.spans = former


def _fresh(weight: Tensor, rank: int, alpha: float, generator: torch.Generator) -> LowRank:
    *experts, outputs, inputs = weight.shape
    bound = 1 / math.sqrt(inputs)
    initial = torch.empty(*experts, rank, inputs).uniform_(-bound, bound, generator=generator)
    return LowRank(
        lora_A=nn.Parameter(initial.to(weight.device)),
        lora_B=nn.Parameter(torch.zeros(*experts, outputs, rank, device=weight.device)),
        scale=alpha / rank,
    )


def _in_place(before: LowRank | None, fresh: LowRank) -> LowRank:
    """Returns the fresh product with the parameters of the one before, if they have its shapes."""
    if before is None or before.lora_A.shape != fresh.lora_A.shape:
        return fresh
    for kept, values in ((before.lora_A, fresh.lora_A), (before.lora_B, fresh.lora_B)):
        kept.data.copy_(values.data)
        kept.grad = None
    return LowRank(before.lora_A, before.lora_B, fresh.scale)


def add_low_rank(output: Tensor, hidden: Tensor, layer: MultiLora, prefix: str) -> Tensor:
    """Adds to `output` `[..., O]`, in place, the product of each span of the row with its tokens in `hidden` `[..., I]`.

    Several spans on a GPU, in bfloat16, are two grouped products. Elsewhere each span is a product of its own, in place, so one
    span costs what it costs alone, and many cost no more than their tokens.
    """
    spans = layer.spans
    assert spans is not None
    products = [layer.adapters[slot][prefix] if slot in layer.adapters else None for slot in spans.slots]
    if not any(products):
        return output
    aligned = output.shape[-1] % ALIGNMENT == 0 and hidden.shape[-1] % ALIGNMENT == 0
    # In float32 grouped products are loops, too, which wait for `ends`.
    if hidden.is_cuda and hidden.dtype == torch.bfloat16 and len(products) > 1 and aligned:
        return add_low_rank_grouped(output, hidden, spans.ends, layer.row_factors(prefix, spans.slots))
    factors = [factor for product in products if product for factor in (product.lora_A, product.lora_B)]
    scales = [product.scale if product else None for product in products]
    result: Tensor = _AddLowRank.apply(output, hidden, spans.lengths, scales, *factors)
    return result


def add_low_rank_grouped(output: Tensor, hidden: Tensor, ends: Tensor, factors: RowFactors) -> Tensor:
    """Does the same by grouped products, on any device. Sizes are multiples of `ALIGNMENT`; `ends` is int32 `[spans]`.

    The operations are as many for any number of spans. The backward pass adds to the gradients of the parameters itself.
    """
    result: Tensor = _AddGrouped.apply(output, hidden, ends, factors, factors.trained())
    return result


class _AddGrouped(torch.autograd.Function):
    """Adds products of contiguous spans by grouped products of stacked factors."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, hidden: Tensor, ends: Tensor, factors: RowFactors, _trained: Tensor | None
    ) -> Tensor:
        ctx.mark_dirty(output)
        ctx.factors = factors
        lora_A, lora_B = factors.stacked(hidden)
        rows_TI = hidden.reshape(-1, hidden.shape[-1])
        shrunk_TR = functional.grouped_mm(rows_TI, lora_A.transpose(-2, -1), offs=ends)
        output.add_(functional.grouped_mm(shrunk_TR, lora_B.transpose(-2, -1), offs=ends).view_as(output))
        ctx.save_for_backward(hidden, ends, shrunk_TR)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hidden, ends, shrunk_TR = ctx.saved_tensors
        # They are made again, since those of every layer would be kept.
        lora_A, lora_B = ctx.factors.stacked(hidden)
        grad_TO = grad.reshape(-1, grad.shape[-1]).contiguous()
        rows_TI = hidden.reshape(-1, hidden.shape[-1])
        grad_shrunk_TR = functional.grouped_mm(grad_TO, lora_B, offs=ends)
        if ctx.needs_input_grad[-1]:
            grad_A = functional.grouped_mm(grad_shrunk_TR.T, rows_TI, offs=ends)
            ctx.factors.add_gradients(grad_A, functional.grouped_mm(grad_TO.T, shrunk_TR, offs=ends))
        grad_hidden = None
        if ctx.needs_input_grad[1]:
            grad_hidden = functional.grouped_mm(grad_shrunk_TR, lora_A, offs=ends).view_as(hidden)
        return grad, grad_hidden, None, None, None


class _AddLowRank(torch.autograd.Function):
    """Adds products of contiguous spans to the rows of one tensor.

    It has its own backward pass because differentiating slices and their concatenation would copy or zero every activation once
    more for every span.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        hidden: Tensor,
        lengths: Sequence[int],
        scales: Sequence[float | None],
        *factors: Tensor,
    ) -> Tensor:
        ctx.mark_dirty(output)
        rows_TO, rows_TI = output.view(-1, output.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
        assert len(rows_TI) == sum(lengths), (
            f"{len(rows_TI)} tokens, of which {sum(lengths)} were announced to `adapter_spans`"
        )
        given, shrunk = iter(factors), []
        for scale, added_TO, taken_TI in zip(scales, rows_TO.split(lengths), rows_TI.split(lengths), strict=True):
            if scale is None:
                continue
            lora_A, lora_B = (next(given).to(hidden.dtype) for _ in range(2))
            shrunk.append(taken_TI @ lora_A.T)
            added_TO.addmm_(shrunk[-1], lora_B.T, alpha=scale)
        ctx.lengths, ctx.scales = lengths, scales
        ctx.save_for_backward(hidden, *factors, *shrunk)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hidden, *saved = ctx.saved_tensors
        count = len(saved) // 3
        factors, shrunk = iter(saved[: 2 * count]), iter(saved[2 * count :])
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[1] else None
        grad_TO, rows_TI = grad.reshape(-1, grad.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
        grad_factors: list[Tensor] = []
        start = 0
        for scale, length in zip(ctx.scales, ctx.lengths, strict=True):
            span = slice(start, start := start + length)
            if scale is None:
                if grad_hidden is not None:
                    grad_hidden.view(-1, hidden.shape[-1])[span].zero_()
                continue
            lora_A, lora_B = (next(factors).to(hidden.dtype) for _ in range(2))
            grad_shrunk_TR = (grad_TO[span] @ lora_B).mul_(scale)
            grad_factors += [grad_shrunk_TR.T @ rows_TI[span], (grad_TO[span].T @ next(shrunk)).mul_(scale)]
            if grad_hidden is not None:
                torch.mm(grad_shrunk_TR, lora_A, out=grad_hidden.view(-1, hidden.shape[-1])[span])
        return grad, grad_hidden, None, None, *grad_factors
