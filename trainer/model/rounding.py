"""How far rounding moves the results of a model: it is run with the inputs of its layers changed at random, as rounding would.

Another engine adds the same numbers in another order, and perhaps in a lower precision, so its results differ. By how much
depends on the model: a mixture whose gate finds two experts nearly equal may send a token to the other one. No bound is right
for all models, so each model's is measured. Every element of what a layer gets is changed, independently, by up to `STRENGTH`
times the largest relative error of bfloat16. Within a layer numbers are rounded several times, and each of two engines has
its own errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

UNIT = 2.0**-9
"""The largest relative error of a number that is rounded to bfloat16."""

STRENGTH = 8.0
"""With it, what is seen in 32 passes bounds the difference between two engines (`docs/inference.md` has figures)."""

_SEED = 0


@contextmanager
def rounded(model: nn.Module) -> Iterator[None]:
    """Changes what the layers of `model` get in every forward pass inside, by the same numbers each time that it is entered."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    generator = torch.Generator().manual_seed(_SEED)  # on the CPU: the same numbers on every device

    def change(hidden: Tensor) -> Tensor:
        noise = torch.rand(hidden.shape, generator=generator).to(hidden.device)
        return (hidden.float() * (1 + (2 * noise - 1) * (STRENGTH * UNIT))).to(hidden.dtype)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
