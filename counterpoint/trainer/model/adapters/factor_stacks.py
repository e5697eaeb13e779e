"""Keeps the factors of many adapters of a layer in one memory, and their gradients, so that a row takes and adds them at once.

A host starts an operation on a GPU in microseconds, which for each slot, factor and projection would be most of a step. So the
parameters of all slots with one rank are parts of one tensor, and so are their gradients; each is a leaf of its own for its
optimizer. Shape suffixes as in `counterpoint/trainer/model/adapters/adapted_layer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.trainer.model.without_waiting import constant

ALIGNMENT = 8
"""Elements: `grouped_mm` takes sizes in multiples of 16 bytes, 8 elements of bfloat16."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """A low-rank product `scale * B A x`, or one for each of several experts. Parameters are float32."""

    lora_A: nn.Parameter
    """`[R, I]` or `[E, R, I]`."""
    lora_B: nn.Parameter
    """`[O, R]` or `[E, O, R]`."""
    scale: float

    @property
    def rank(self) -> int:
        """The rank, `R`."""
        return int(self.lora_A.shape[-2])


class Stack:
    """The adapters of one rank for one weight, all trained or none, by slot."""

    def __init__(self, products: Mapping[int, LowRank]) -> None:
        """Moves the parameters of `products`, by slot, into one memory. Their values stay, and so do their gradients."""
        own = list(products.values())
        self.places = {slot: place for place, slot in enumerate(products)}
        self.rank = own[0].rank
        self.scales = [product.scale for product in own]
        self.parameters = [product.lora_A for product in own], [product.lora_B for product in own]
        self.factors = tuple(_joined(each) for each in self.parameters)
        """A `[slots, R, I]` and B `[slots, O, R]`, or with the experts after the slots, float32."""
        self._sums: list[tuple[Tensor, list[Tensor]]] = []
        """The gradients of each factor, and the part of each slot."""

    @property
    def is_trained(self) -> bool:
        """Whether the parameters have gradients."""
        return bool(self.parameters[0][0].requires_grad)

    def dissolve(self) -> None:
        """Gives each parameter a memory of its own again, so that none keeps that of others."""
        for parameter in (each for parameters in self.parameters for each in parameters):
            parameter.data = parameter.data.clone()

    def sums(self, factor: int, places: Sequence[int]) -> Tensor:
        """Returns the gradients of all slots, of which those at `places` are what their parameters have so far, or zeros."""
        if not self._sums:
            self._sums = [(sums, list(sums.unbind())) for sums in map(torch.zeros_like, self.factors)]
        sums, parts = self._sums[factor]
        fresh = []
        for place in places:
            parameter, part = self.parameters[factor][place], parts[place]
            if (held := parameter.grad) is part:
                continue
            if held is None:
                fresh.append(place)
            else:
                part.copy_(held)  # of a row of that slot alone
            parameter.grad = part
        if fresh:
            sums.index_fill_(0, _index(tuple(fresh), sums.device), 0.0)
        return sums


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    joined = torch.stack([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joined.unbind(), strict=True):
        parameter.data = part
    return joined


@dataclass(frozen=True, slots=True)
class _Part:
    """What groups of a row's tokens take of one stack."""

    stack: Stack
    groups: tuple[int, ...]
    places: tuple[int, ...]
    """The places in the stack of each group's slot."""

    @property
    def scales(self) -> Tensor:
        """The scale of each group, float32, `[groups, 1, 1]`, or with the experts as factors have them."""
        factor = self.stack.factors[0]
        values = tuple(self.stack.scales[place] for place in self.places)
        return constant(values, torch.float32, factor.device).view(-1, *[1] * (factor.dim() - 1))


class RowFactors:
    """The factors of the groups of a row's tokens, each of a slot."""

    def __init__(self, stacks: Sequence[Stack], slots: Sequence[int], own: slice | None = None) -> None:
        """Finds them in `stacks`; of factors for each of several experts, those of `own`, or of all if that is None."""
        self._groups = len(slots)
        self._own = own
        self._parts: list[_Part] = []
        for stack in stacks:
            if pairs := [(group, stack.places[slot]) for group, slot in enumerate(slots) if slot in stack.places]:
                groups, places = zip(*pairs, strict=True)
                self._parts.append(_Part(stack, groups, places))

    def __bool__(self) -> bool:
        """Whether any group has an adapter."""
        return bool(self._parts)

    def trained(self) -> Tensor | None:
        """Returns one of the parameters that have a gradient, if any has one."""
        return next((part.stack.parameters[0][0] for part in self._parts if part.stack.is_trained), None)

    def stacked(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the factors of all groups, with ranks padded by zeros, in the dtype of `like`.

        Returns:
            A `[*experts, groups, R, I]` and B `[*experts, groups, O, R]` with the scale in it; zeros without an adapter.
        """
        rank = -(-max(part.stack.rank for part in self._parts) // ALIGNMENT) * ALIGNMENT
        example_A, example_B = (self._of_own(factor) for factor in self._parts[0].stack.factors)
        experts = example_A.shape[1:-2]
        is_whole = len(self._parts[0].groups) == self._groups and self._parts[0].stack.rank == rank
        make = like.new_empty if is_whole else like.new_zeros
        stacked_A = make(*experts, self._groups, rank, example_A.shape[-1])
        stacked_B = make(*experts, self._groups, example_B.shape[-2], rank)
        for part in self._parts:
            lora_A, lora_B = (self._of_own(_taken(factor, part.places)) for factor in part.stack.factors)
            to_A, to_B = _by_group(stacked_A, stacked_B, part.stack.rank)
            range_A, range_B = _in_range(to_A, part.groups), _in_range(to_B, part.groups)
            if range_A is not None:
                range_A.copy_(lora_A)
                torch.mul(lora_B, part.scales, out=range_B)
            else:
                index = _index(part.groups, like.device)
                to_A.index_copy_(0, index, lora_A.to(like.dtype))
                to_B.index_copy_(0, index, (lora_B * part.scales).to(like.dtype))
        return stacked_A, stacked_B

    def add_gradients(self, grad_A: Tensor, grad_B: Tensor) -> None:
        """Adds to the gradients of the parameters those by what `stacked` has returned."""
        for part in self._parts:
            if not part.stack.is_trained:
                continue
            by_A, by_B = (_taken(grad, part.groups) for grad in _by_group(grad_A, grad_B, part.stack.rank))
            # The scales are float32, and so is the product.
            for factor, grad in enumerate((by_A, by_B * part.scales)):
                sums = self._of_own(part.stack.sums(factor, part.places))
                if (in_range := _in_range(sums, part.places)) is not None:
                    in_range.add_(grad)
                else:
                    sums.index_add_(0, _index(part.places, sums.device), grad.float())

    def _of_own(self, factor: Tensor) -> Tensor:
        return factor if self._own is None else factor[:, self._own]


def _in_range(tensor: Tensor, places: tuple[int, ...]) -> Tensor | None:
    """Returns what is at places that follow each other, which takes no copy."""
    first, end = places[0], places[0] + len(places)
    if places != tuple(range(first, end)):
        return None
    return tensor if len(places) == len(tensor) else tensor[first:end]


def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    return constant(places, torch.int64, device)


def _taken(tensor: Tensor, places: tuple[int, ...]) -> Tensor:
    found = _in_range(tensor, places)
    return tensor.index_select(0, _index(places, tensor.device)) if found is None else found


def _by_group(stacked_A: Tensor, stacked_B: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Returns the part of the stacked factors that a rank has, with the groups first."""
    if stacked_A.dim() > 3:
        stacked_A, stacked_B = stacked_A.movedim(-3, 0), stacked_B.movedim(-3, 0)
    if rank == stacked_A.shape[-2]:
        return stacked_A, stacked_B
    return stacked_A.narrow(-2, 0, rank), stacked_B.narrow(-1, 0, rank)


def stacked(factors: RowFactors, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `factors.stacked(like)`, so that a backward pass adds to the gradients of the parameters."""
    result: tuple[Tensor, Tensor] = _Stacked.apply(like.detach(), factors, factors.trained())
    return result


class _Stacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor, factors: RowFactors, _trained: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.factors = factors
        return factors.stacked(like)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_A: Tensor, grad_B: Tensor) -> tuple[None, None, None]:
        ctx.factors.add_gradients(grad_A, grad_B)
        return None, None, None
