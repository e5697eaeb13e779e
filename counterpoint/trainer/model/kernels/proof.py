"""Compares a kernel of attention, values and gradients, with attention in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNEL_BOUND = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""Allowed difference of a kernel from attention in float32, relative to the largest value: a few roundings of each value."""

_SPREAD = 3.0
"""The standard deviation of the scores in a proof: some tokens attend to few others, and each one counts."""


@dataclass(frozen=True, slots=True)
class Heads:
    """What a kernel is proven for."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    groups: int
    size: int
    value_size: int
    scaling: float | None

    def __str__(self) -> str:
        return f"{self.heads} heads ({self.groups} of keys) of {self.size} numbers in {str(self.dtype).split('.')[-1]}"


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _as_in_training() -> Iterator[None]:
    """Has a proof compute what training does, whatever surrounds it: with gradients, and by the same kernels."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(before[0] and not before[1])  # a proof around it only warns, unlike training
    try:
        # In a layer that is computed again, torch would do that for the proof's own backward pass.
        with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@_as_in_training()
def prove(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], heads: Heads, lengths: Sequence[int], spoilt: int | None = None
) -> None:
    """Compares values and gradients of a row of random samples with attention in float32.

    The sample with the number `spoilt` is NaN, in its gradient as well, and must change no other one: no factor of zero hides it.

    Raises:
        ValueError: they differ by more than rounding.
    """
    generator = torch.Generator(heads.device).manual_seed(20_240_229)
    scale = heads.size**-0.5 if heads.scaling is None else heads.scaling
    shapes = (
        (heads.heads, heads.size), (heads.groups, heads.size), (heads.groups, heads.value_size),
        (heads.heads, heads.value_size),
    )  # fmt: skip
    states = [
        torch.randn((sum(lengths), *shape), generator=generator, device=heads.device, dtype=torch.float32)
        for shape in shapes
    ]
    states[0] *= _SPREAD / (heads.size**0.5 * max(abs(scale), 1e-6))
    rounded = [state.to(heads.dtype) for state in states]
    given = [state.clone() for state in rounded]
    if spoilt is not None:
        for state in given:
            state.split(list(lengths))[spoilt].fill_(torch.nan)
    query, key, value = (state.requires_grad_() for state in given[:3])
    found = attend(query, key, value)
    results = [found, *torch.autograd.grad(found, (query, key, value), given[3])]
    parts = [result.detach().split(list(lengths)) for result in results]
    exact = [state.float().split(list(lengths)) for state in rounded]
    for index, length in enumerate(lengths):
        if index != spoilt:
            _require_equal([part[index] for part in parts], [part[index] for part in exact], scale, length, heads.dtype)


def _require_equal(
    found: Sequence[Tensor], states: Sequence[Tensor], scale: float, length: int, dtype: torch.dtype
) -> None:
    """Raises `ValueError` unless `found`, of one sample, are values and gradients of attention in float32."""
    *inputs, gradient = (state.transpose(0, 1)[None] for state in states)
    query, key, value = (state.requires_grad_() for state in inputs)
    with sdpa_kernel(SDPBackend.MATH):
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
    expected = [attended, *torch.autograd.grad(attended, (query, key, value), gradient)]
    names = ("values", "gradients of queries", "gradients of keys", "gradients of values")
    for name, ours, theirs in zip(names, found, expected, strict=True):
        exact = theirs[0].detach().transpose(0, 1)
        # The gradients of the scores of a lone token are 0, but for rounding.
        largest = exact.abs().amax().clamp(min=1e-2)
        difference = float((ours.float() - exact).abs().amax() / largest)
        if math.isnan(difference):
            raise ValueError(f"{name} of a sample of {length} tokens are NaN; those of attention in float32 are not")
        if difference > KERNEL_BOUND[dtype]:
            raise ValueError(
                f"{name} of a sample of {length} tokens differ from those of attention in float32 by {difference:.2g} of the "
                f"largest (at most {KERNEL_BOUND[dtype]:g})"
            )
